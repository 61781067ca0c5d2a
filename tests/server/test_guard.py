"""Nobody gets in without the token, nothing large gets far, and no answer tells too much."""

import gzip
import json
import re
import socket
from urllib.parse import parse_qs

import pytest

from tests.server.clients import call, complete, connected, exchange, until_closed
from tests.server.engines import MODEL, TOKEN, ScriptedRollout, byte_tokenizer, saying
from verl.server import RunningServer, ServerOptions, serve
from verl.utils.environment import temp_env_var, variables_of_verl
from verl.utils.json_server import page_policy

ROUTES = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics",
          "/openapi.json", "/docs", "/redoc", "/nowhere", "//v1/models", "/v1/../v1/models",
          "/v1/models/", "/%76%31/models", "/livez/", "/livez/../health", "//livez"]  # fmt: skip
BODY = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
LEAKS = re.compile(r"Traceback|File \"|0x[0-9a-f]{6,}|/secret|/root|/usr|site-packages|\.py\b")


def request_text(path: str, *headers: str, body: bytes = b"", method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_no_route_answers_without_the_token(plain_server, path):
    wrong = [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()]
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        for token in wrong if method in ("GET", "POST") else [None]:
            body = BODY if method == "POST" else None
            status, _, _ = call(plain_server, path, body, method=method, token=token)
            assert status == 401, (method, path, token)


def test_the_token_must_be_in_its_header(plain_server):
    assert call(plain_server, f"/health?token={TOKEN}", token=None)[0] == 401
    assert call(plain_server, f"/health?api_key={TOKEN}", token=None)[0] == 401
    for value in (TOKEN, f"Basic {TOKEN}", f"Bearer  {TOKEN}", f"Bearer {TOKEN} x"):
        headers = {"Authorization": value}
        assert call(plain_server, "/health", token=None, headers=headers)[0] == 401
    twice = f"Authorization: Bearer {TOKEN}"
    assert (
        status_of(exchange(plain_server, request_text("/health", twice, twice, method="GET")))
        == 401
    )


def test_only_the_sign_of_life_and_the_page_are_open(plain_server):
    status, _, body = call(plain_server, "/livez", token=None)
    assert (status, json.loads(body)) == (200, {"status": "alive"})
    assert call(plain_server, "/livez", b"{}", token=None)[0] == 401
    status, _, page = call(plain_server, "/", token=None)
    assert status == 200
    assert TOKEN.encode() not in page


def test_the_page_may_run_what_it_came_with_and_nothing_else(plain_server):
    _, headers, page = call(plain_server, "/", token=None)
    policy = headers["content-security-policy"]
    assert policy == page_policy(page.decode())
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert b"Content-Security-Policy" not in page  # one policy, computed from what is sent


def test_the_address_of_the_page_carries_any_token_whole():
    options = ServerOptions(model=MODEL, max_model_len=64, token="a+b&history=off#%41/?")
    with serve([ScriptedRollout(saying("a"))], byte_tokenizer(), options) as server:
        base, fragment = server.page_url.split("#")
        assert base == f"{server.url}/"
        assert parse_qs(fragment) == {"token": ["a+b&history=off#%41/?"]}


def test_roundabout_paths_lead_nowhere(plain_server):
    for path in ("//v1/models", "/v1/../v1/models", "/v1/models/", "/livez/../health", "/docs"):
        status, headers, _ = call(plain_server, path)
        assert status == 404, path
        assert "location" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "a/?x=", "localhost.evil.example", "127.0.0.1@e", ""]
)
def test_a_foreign_name_of_the_server_is_refused(plain_server, host):
    for path in ("/health", "/livez"):
        assert call(plain_server, path, headers={"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1234", "[::1]:5"])
def test_names_of_this_machine_are_known(plain_server, host):
    assert call(plain_server, "/health", headers={"Host": host})[0] == 200


def test_a_token_is_shown_once_where_it_is_made_and_never_where_it_is_given():
    options = ServerOptions(model=MODEL, max_model_len=64)
    with serve([ScriptedRollout(saying("a"))], byte_tokenizer(), options) as server:
        assert len(server.token) >= 32
        assert server.token not in repr(server.service.options)
        assert call(server, "/health", token=server.token)[0] == 200
        assert server.where() == {
            "API": f"{server.url}/v1", "token": server.token,
            "chat in the browser": server.page_url,
        }  # fmt: skip
    with (
        temp_env_var("VERL_SERVER_TOKEN", "token-from-outside"),
        serve([ScriptedRollout(saying("a"))], byte_tokenizer(), options) as server,
    ):
        assert server.token == "token-from-outside"
        assert "VERL_SERVER_TOKEN" in server.where()["token"]
        assert "token-from-outside" not in str(server.where())
        assert "VERL_SERVER_TOKEN" not in variables_of_verl()
    with (
        temp_env_var("VERL_SERVER_TOKEN", "short"),
        pytest.raises(ValueError, match="16 or more visible"),
    ):
        serve([ScriptedRollout(saying("a"))], byte_tokenizer(), options)


@pytest.mark.parametrize("token", ["short", "with spaces in between", "line\nbreak-in-the-token"])
def test_a_token_that_cannot_protect_is_refused(token):
    with pytest.raises(ValueError, match="16 or more visible") as error:
        ServerOptions(model=MODEL, max_model_len=64, token=token)
    assert token not in str(error.value)


def test_a_server_is_reachable_from_its_machine_only_by_default(plain_server):
    assert plain_server.service.options.is_loopback
    assert plain_server.url.startswith("http://127.0.0.1:")


# ---- what may be sent ----------------------------------------------------------------------------


def authorized(*headers: str) -> list[str]:
    return [f"Authorization: Bearer {TOKEN}", "Content-Type: application/json", *headers]


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def send_much(server: RunningServer, head: bytes, part: bytes, count: int) -> bytes:
    """A head, then a part again and again, unless the server hangs up."""
    with connected(server) as connection:
        connection.sendall(head)
        try:
            for _ in range(count):
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # it has hung up; the answer may still be there
            return until_closed(connection)
        return until_closed(connection)


def test_a_body_that_says_it_is_too_long_is_refused_unread(plain_server):
    before = rss_bytes()
    head = request_text("/v1/completions", *authorized(f"Content-Length: {200 << 20}"))
    answer = send_much(plain_server, head, b"x" * (1 << 20), 200)
    assert status_of(answer) == 413
    assert rss_bytes() - before < 32 << 20


def test_chunks_without_an_end_are_refused_at_the_limit(plain_server):
    before = rss_bytes()
    head = request_text("/v1/completions", *authorized("Transfer-Encoding: chunked"))
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    assert status_of(send_much(plain_server, head, chunk, 60)) == 413
    assert rss_bytes() - before < 32 << 20


def test_compressed_bodies_are_refused(plain_server):
    bomb = gzip.compress(b"[" * (1 << 20))
    headers = {"Content-Encoding": "gzip"}
    assert call(plain_server, "/v1/completions", bomb, headers=headers)[0] == 415


def test_bodies_that_are_not_json_are_refused(plain_server):
    headers = {"Content-Type": "text/plain"}
    assert call(plain_server, "/v1/completions", BODY, headers=headers)[0] == 415
    for body in (b"", b"{", b"[]", b"nan", b'{"model": NaN}', b'"\\ud800"', b"\xff", b"1", b"null"):
        assert call(plain_server, "/v1/completions", body)[0] in (400, 415), body


@pytest.mark.parametrize("piece", [b"[", b'{"a":'])
def test_json_nested_a_hundred_thousand_deep_is_refused(plain_server, piece):
    assert call(plain_server, "/v1/completions", piece * 100_000)[0] == 400
    tools = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{"type":'
    tools += b'"function", "function": {"name": "f", "parameters": {"a": ' + piece * 100_000
    assert call(plain_server, "/v1/chat/completions", tools)[0] == 400


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: +4",),
        ("Content-Length: 0x4",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        (" Content-Length: 4",),
        ("Host: other",),
    ],
)
def test_requests_of_doubtful_length_are_refused_and_nothing_behind_them_is_read(
    plain_server, headers
):
    hidden = request_text("/health", f"Authorization: Bearer {TOKEN}", method="GET")
    data = request_text("/v1/completions", *authorized(*headers), body=b"0\r\n\r\n" + hidden)
    answer = exchange(plain_server, data.replace(b"Connection: close\r\n", b"", 1))
    assert 400 <= status_of(answer) < 500
    assert b"HTTP/1.1 2" not in answer


def test_other_methods_and_upgrades_are_refused(plain_server):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = call(plain_server, "/v1/completions", method=method)
        assert status == 405
        assert headers["allow"] == "POST"
    upgrade = request_text("/v1/models", *authorized("Upgrade: websocket"), method="GET")
    upgrade = upgrade.replace(b"Connection: close", b"Connection: upgrade")
    with connected(plain_server) as connection:
        connection.sendall(upgrade)
        assert b"101" not in connection.recv(100).split(b"\r\n")[0]


# ---- what may be said ----------------------------------------------------------------------------


def test_every_error_is_a_typed_object_that_tells_nothing_of_the_inside(plain_server):
    answers = [
        call(plain_server, "/v1/completions", body)
        for body in (b"{", BODY[:-1] + b', "n": 1e9}', BODY.replace(b"tiny", b"other"))
    ]
    answers += [call(plain_server, "/nowhere"), call(plain_server, "/v1/models", method="PUT")]
    answers += [call(plain_server, "/health", token=None)]
    for status, headers, body in answers:
        assert status >= 400
        assert headers["content-type"] == "application/json"
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not LEAKS.search(body.decode()), body
        assert "server" not in headers


def test_a_failure_inside_is_not_told_to_clients(caplog):
    def failing(request):
        raise KeyError("at 0x7f00dead in /secret/place.py")

    options = ServerOptions(model=MODEL, max_model_len=64, token=TOKEN)
    with serve([ScriptedRollout(failing)], byte_tokenizer(), options) as server:
        for fields in ({}, {"stream": True}):
            status, answer = complete(server, **fields)
            assert status == 500
            assert not LEAKS.search(json.dumps(answer))
    assert "/secret/place.py" in caplog.text


def test_garbage_is_answered_with_a_refusal(plain_server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 100_000):
        answer = exchange(plain_server, data)
        assert status_of(answer) == 400
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert not LEAKS.search(answer.decode())
