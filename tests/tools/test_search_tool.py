"""The search tool against the retrieval server of examples/search, and against broken ones."""

import asyncio
import json
import math
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.pace import wait_until
from verl.protocol.trajectory import InfraFault
from verl.tools import services
from verl.tools.leases import ToolSet
from verl.tools.parsers import FunctionCall
from verl.tools.search_tool import SearchTool
from verl.utils import breaker
from verl.utils.http_json import RequestFailed, request_json
from verl.utils.json_server import JsonServer, Refusal

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "search"))

from retrieval_server import Bm25, make_server

FACTS = ["mabor\ncode 417", "mabor\nage 29", "tilum\ncode 828", "the long river\nit is 512 km long"]
DOCUMENTS = [{"id": i, "contents": text} for i, text in enumerate(FACTS)]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(services, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def retrieval(monkeypatch):
    with make_server(DOCUMENTS) as server:
        monkeypatch.setenv("VERL_RETRIEVAL_TOKEN", server.token)
        yield server


def tool(url, **config):
    return SearchTool({"retrieval_service_url": url, "timeout": 5, **config})


async def search(a_tool, *queries):
    response, reward, metrics = await a_tool.execute("id", {"query_list": list(queries)})
    assert reward == 0.0
    return response.text, metrics


# ---- what the model reads ------------------------------------------------------------------------


async def test_passages_come_back_best_first_with_their_titles(retrieval):
    text, metrics = await search(tool(f"{retrieval.url}/retrieve", topk=2), "mabor age", "river")
    assert json.loads(text) == {
        "result": "Doc 1 (Title: mabor)\nage 29\n\nDoc 2 (Title: mabor)\ncode 417\n---\n"
        "Doc 1 (Title: the long river)\nit is 512 km long"
    }
    assert metrics == {"query_count": 2, "total_results": 3, "status": "success"}
    plain, _ = await search(tool(f"{retrieval.url}/retrieve", topk=1, reply="text"), "tilum")
    assert plain == "Doc 1 (Title: tilum)\ncode 828"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"query": "mabor"}', "must be a list with at least one query"),
        ('{"query_list": []}', "must be a list with at least one query"),
        ('{"query_list": [7]}', "every query must be a text; one is 7"),
        (json.dumps({"query_list": ["x"] * 17}), "has 17 queries; at most 16 are served"),
        (json.dumps({"query_list": ["x" * 5000]}), "5000 characters; at most 4096 are served"),
    ],
)
async def test_a_call_with_bad_arguments_is_refused_with_words_for_the_model(
    retrieval, arguments, told
):
    tools = ToolSet([tool(f"{retrieval.url}/retrieve")])
    async with tools.lease("row") as lease:
        outcome = await lease.call(FunctionCall(name="search", arguments=arguments))
    tools.close()
    assert outcome.kind == "refused"
    assert told in outcome.response.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no retrieval_service_url"),
        ({"retrieval_service_url": "http://x", "topk": 0}, "topk of SearchTool is 0"),
        ({"retrieval_service_url": "http://x", "reply": "xml"}, "must be json or text"),
        ({"retrieval_service_url": "http://x", "rate_limit": 0}, "allow at least one"),
        ({"retrieval_service_url": "http://x", "timeout": 0}, "must be positive"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        SearchTool(config)


# ---- a service that is broken --------------------------------------------------------------------


def replying(reply):
    """A service whose every reply is `reply`, or what it returns."""

    def retrieve(request):
        return reply(request) if callable(reply) else reply

    return JsonServer({("POST", "/retrieve"): retrieve}, token="")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([], "must reply"),
        ({"result": []}, "with 1 lists of passages"),
        ({"result": [[{"document": {}, "score": 1.0}]]}, "without a text in document.contents"),
        ({"result": [[{"document": {"contents": 7}}]]}, "without a text in document.contents"),
    ],
)
async def test_a_reply_of_another_form_is_a_broken_world(reply, message):
    with replying(reply) as server, pytest.raises(InfraFault, match=message):
        await search(tool(f"{server.url}/retrieve"), "mabor")


async def test_a_service_that_is_away_or_refuses_is_infra_and_no_reply(retrieval, monkeypatch):
    monkeypatch.setenv("VERL_RETRIEVAL_TOKEN", "not-the-token-of-it")
    with pytest.raises(InfraFault, match=r"401.*wants a token"):
        await search(tool(f"{retrieval.url}/retrieve"), "mabor")
    with replying(None) as server:
        url = f"{server.url}/retrieve"
    tools = ToolSet([tool(url, timeout=0.05)])
    async with tools.lease("row") as lease:
        outcome = await lease.call(
            FunctionCall(name="search", arguments='{"query_list": ["mabor"]}')
        )
    tools.close()
    assert outcome.kind == "infra"
    assert "did not answer" in outcome.response.text


async def test_a_service_that_never_replies_ends_at_the_deadline():
    held, requests = threading.Event(), []

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(self.path)
            held.wait(60)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        with pytest.raises(InfraFault, match="did not answer: TimeoutError"):
            await search(tool(f"http://127.0.0.1:{http.server_port}/retrieve", timeout=0.3), "x")
        wait_until(lambda: requests)  # it was asked
    finally:
        held.set()
        http.shutdown()
        http.server_close()
        thread.join()


async def test_a_fault_that_passes_is_not_seen_by_the_model():
    faults = [503, 503]

    def flaky(request):
        if faults:
            raise Refusal(faults.pop(), "busy")
        return {"result": [[{"document": {"contents": "a\nb"}, "score": 1.0}]]}

    with replying(flaky) as server:
        text, _ = await search(tool(f"{server.url}/retrieve"), "mabor")
    assert json.loads(text) == {"result": "Doc 1 (Title: a)\nb"}


async def test_after_many_faults_calls_wait_until_the_service_is_back(monkeypatch):
    is_broken, pauses = threading.Event(), []

    def retrieve(request):
        if is_broken.is_set():
            raise Refusal(500, "broken")
        return {"result": [[]]}

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            is_broken.clear()

    monkeypatch.setattr(breaker, "sleep", sleep)
    with replying(retrieve) as server:
        a_tool = tool(f"{server.url}/retrieve")
        await search(a_tool, "mabor")
        is_broken.set()
        for _ in range(13):
            with pytest.raises(InfraFault, match="HTTP 500"):
                await search(a_tool, "mabor")
        assert await search(a_tool, "mabor")
    assert len(pauses) == 2


async def test_at_most_rate_limit_requests_are_under_way():
    lock, running, most = threading.Lock(), 0, 0
    pair = threading.Barrier(2)

    def retrieve(request):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pair.wait(30)  # two do run at once
        with lock:
            running -= 1
        return {"result": [[]]}

    with replying(retrieve) as server:
        a_tool = tool(f"{server.url}/retrieve", rate_limit=2)
        await asyncio.gather(*(search(a_tool, "mabor") for _ in range(8)))
    assert most == 2


# ---- the server of the example -------------------------------------------------------------------


def test_bm25_is_the_formula():
    texts = ["a b a c", "a", "b c d d d", ""]
    k, b = 1.2, 0.75
    words = [text.split() for text in texts]
    mean = sum(map(len, words)) / len(words)

    def score(query, document):
        total = 0.0
        for word in query.split():
            n = sum(word in other for other in words)
            tf = Counter(document)[word]
            idf = math.log(1 + (len(words) - n + 0.5) / (n + 0.5))
            total += idf * tf * (k + 1) / (tf + k * (1 - b + b * len(document) / mean))
        return total

    index = Bm25(texts)
    for query in ("a", "b d", "a a c", "d A"):
        ranked = [(i, score(query.lower(), words[i])) for i in range(len(texts))]
        expected = sorted((p for p in ranked if p[1] > 0), key=lambda pair: -pair[1])
        assert index.search(query, 10) == [(i, pytest.approx(s)) for i, s in expected]
    assert index.search("nowhere", 3) == []


@pytest.mark.parametrize(
    ("payload", "status"),
    [({"queries": []}, 422), ({"queries": ["x"], "topk": 1000}, 422), ([], 422), (7, 422)],
)
def test_the_server_refuses_what_it_cannot_serve(retrieval, payload, status):
    limits = {"timeout_seconds": 10, "max_response_bytes": 10_000}
    with pytest.raises(RequestFailed) as failure:
        request_json("POST", f"{retrieval.url}/retrieve", payload, token=retrieval.token, **limits)
    assert failure.value.status == status
    documents = request_json(
        "POST", f"{retrieval.url}/retrieve", {"queries": ["tilum"]}, token=retrieval.token, **limits
    )
    assert documents == {"result": [[DOCUMENTS[2]]]}


def test_a_server_for_other_machines_needs_a_token():
    with pytest.raises(ValueError, match="needs a token"):
        JsonServer({}, host="0.0.0.0", token="")
    with pytest.raises(ValueError, match="16 or more characters"):
        JsonServer({}, token="short")
