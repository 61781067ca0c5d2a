"""Tools over HTTP: the client against the reference server, in one process, over real sockets."""

import json
import uuid
from types import SimpleNamespace

import pytest

from tests.agent_loop.scripted import END, ScriptedRollout, run_loop, turns_config
from tests.agent_loop.scripted import call as turn
from tests.pace import pace
from verl.protocol.trajectory import InfraFault
from verl.tools.http_tools import tools_of_server
from verl.tools.leases import ToolSet
from verl.tools.parsers import FunctionCall
from verl.tools.serve import ToolService, main
from verl.tools.tool_registry import is_mcp_address, load_all_tools
from verl.utils.http_json import RequestFailed, request_json
from verl.utils.json_server import JsonServer

FUNCTIONS = '''
from verl.protocol.trajectory import InfraFault
from verl.tools.function_tool import function_tool


@function_tool("{name}_add")
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: The first.
    """
    return str(a + b), 0.5, {{"sum": a + b}}


@function_tool("{name}_fail")
def fail(how: str) -> str:
    """Fail."""
    if how == "world":
        raise InfraFault("the disk is gone")
    if how == "time":
        raise TimeoutError("too slow")
    if how == "long":
        return "x" * 2_000_000
    raise RuntimeError("no idea")
'''

COUNTER = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

LOG = []


class Counter(BaseTool):
    """Counts the calls of a session."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id=None, **kwargs):
        self.counts[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += 1
        return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}

    async def release(self, instance_id, **kwargs):
        LOG.append(self.counts.pop(instance_id))
'''


class Served:
    """A server of the tools of a file, and its leases."""

    def __init__(self, tools, **options):
        self.service = ToolService(tools, **options)
        self.server = JsonServer(self.service.routes).start()
        self.url = self.server.url

    def close(self):
        self.server.stop()
        self.service.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    opened = []

    def serve(kind="functions", **options):
        if kind == "functions":
            file = tmp_path / "tools.py"
            file.write_text(FUNCTIONS.format(name=f"t{uuid.uuid4().hex}"))
            tools = load_all_tools(None, str(file))
        else:
            (tmp_path / "counting.py").write_text(COUNTER)
            monkeypatch.syspath_prepend(str(tmp_path))
            schema = {"type": "function", "function": {"name": "count", "description": "Counts."}}
            entry = {"class_name": "counting.Counter", "config": {}, "tool_schema": schema}
            (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
            tools = load_all_tools(str(tmp_path / "tools.yaml"), None)
        opened.append(Served(tools, **options))
        monkeypatch.setenv("VERL_TOOL_SERVER_TOKEN", opened[-1].server.token)
        return opened[-1]

    yield serve
    for one in opened:
        one.close()


async def call(url, name, agent_data=None, **arguments):
    tools = ToolSet(tools_of_server(url, timeout_seconds=20), max_response_length=4000)
    async with tools.lease("row") as lease:
        made = FunctionCall(name=name, arguments=json.dumps(arguments))
        outcome = await lease.call(made, agent_data)
    tools.close()
    return outcome


async def test_a_functions_reply_reward_and_metrics_come_over_the_wire(served):
    one = served()
    tools = tools_of_server(one.url)
    assert [tool.name[-4:] for tool in tools] == ["_add", "fail"]
    assert tools[0].tool_schema.offered()["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer"},
        },
        "required": ["a"],
    }
    outcome = await call(one.url, tools[0].name, a=2, b=3)
    assert (outcome.kind, outcome.response.text, outcome.reward) == ("reply", "5", 0.5)
    assert outcome.metrics == {"sum": 5}


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("raise", "refused", "no idea"),
        ("time", "timeout", "too slow"),
        ("world", "infra", "the disk is gone"),
        ("long", "reply", "(truncated)"),
    ],
)
async def test_every_outcome_has_the_same_meaning_on_both_sides(served, how, kind, told):
    one = served()
    outcome = await call(
        one.url, next(n for n in one.service.tool_set.tools if "fail" in n), how=how
    )
    assert outcome.kind == kind
    assert told in outcome.response.text


async def test_a_session_keeps_its_instance_until_the_trajectory_ends(served):
    one = served("counter")
    import counting

    counting.LOG.clear()
    tools = ToolSet(tools_of_server(one.url))
    made = FunctionCall(name="count", arguments="{}")
    trajectories = [tools.lease("row 1"), tools.lease("row 2")]
    data = [SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b")]
    replies = [
        (await trajectories[who].call(made, data[who])).response.text for who in (0, 1, 0, 0, 1)
    ]
    assert replies == ["1", "1", "2", "3", "2"]
    for lease in trajectories:
        await lease.release()
    assert counting.LOG == [3, 2]
    tools.close()


def test_the_agent_loop_calls_the_tools_of_a_server(served):
    one = served()
    add = next(name for name in one.service.tool_set.tools if name.endswith("_add"))
    engine = ScriptedRollout(turn(add, '{"a": 2, "b": 3}') + END, f"It is 5.{END}")
    output = run_loop(turns_config(tool_server=one.url), engine, "What is 2 + 3?")
    assert "5" in engine.tokenizer.decode(
        [i for i, m in zip(output.response_ids, output.response_mask, strict=True) if not m]
    )
    assert output.extra_fields["tool_rewards"] == [0.5]
    assert not one.service._leases  # the session was released


async def test_sessions_are_limited_and_forgotten_ones_are_given_back(served):
    one = served("counter", max_sessions=1, session_seconds=3600)
    import counting

    counting.LOG.clear()
    one.service.call({"name": "count", "arguments": {}, "session": "a"})
    with pytest.raises(InfraFault, match=r"429.*1 sessions are open"):
        await tools_of_server(one.url, timeout_seconds=1 * pace())[0].execute("b", {})
    one.service.session_seconds = 0.0
    reply = one.service.call({"name": "count", "arguments": {}, "session": "b"})
    assert reply["text"] == "1"
    one.service.tool_set.close()
    assert sorted(counting.LOG) == [1, 1]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({}, "must reply a list of 1 to 128"),
        ([], "must reply a list of 1 to 128"),
        ([{"type": "function"}], "lists what is no tool"),
        ([{"type": "function", "function": {"name": "a b"}}], "names have 1 to 64 letters"),
        ([{"type": "function", "function": {"name": "a"}}] * 2, "two tools named 'a'"),
    ],
)
def test_a_list_that_is_no_list_of_tools_is_refused(reply, message):
    server = JsonServer({("GET", "/tools"): lambda _: reply}, token="")
    with server, pytest.raises(ValueError, match=message):
        tools_of_server(server.url)


@pytest.mark.parametrize(
    "reply", [[], {}, {"text": 7}, {"text": "a", "reward": "b"}, {"text": "a", "metrics": [1]}]
)
async def test_a_reply_that_is_no_reply_is_a_broken_world(reply):
    listed = [{"type": "function", "function": {"name": "a"}}]
    routes = {("GET", "/tools"): lambda _: listed, ("POST", "/call"): lambda _: reply}
    with JsonServer({**routes, ("POST", "/release"): lambda _: {}}, token="") as server:
        outcome = await call(server.url, "a")
    assert outcome.kind == "infra"
    assert "must reply" in outcome.response.text


def test_without_the_token_nothing_is_listed_or_called(served, monkeypatch):
    one = served()
    monkeypatch.delenv("VERL_TOOL_SERVER_TOKEN")
    with pytest.raises(InfraFault, match=r"401.*VERL_TOOL_SERVER_TOKEN"):
        tools_of_server(one.url)
    limits = {"timeout_seconds": 10, "max_response_bytes": 1000}
    with pytest.raises(RequestFailed, match="401"):
        request_json("POST", f"{one.url}/call", {}, **limits)
    assert request_json("GET", f"{one.url}/health", **limits) == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "payload", "status"),
    [
        ("/call", {"name": "a", "arguments": "{}", "session": "s"}, 422),
        ("/call", {"name": "a", "arguments": {}, "session": ""}, 422),
        ("/call", {"name": "a", "arguments": {}, "session": "s" * 300}, 422),
        ("/call", [], 422),
        ("/release", {}, 422),
        ("/nothing", {}, 405),
        ("/call", {"text": "x" * 2_000_000}, 413),
    ],
)
def test_requests_outside_of_the_protocol_are_refused(served, path, payload, status):
    one = served()
    with pytest.raises(RequestFailed) as failure:
        request_json(
            "POST", f"{one.url}{path}", payload, token=one.server.token,
            timeout_seconds=10, max_response_bytes=10_000,
        )  # fmt: skip
    assert failure.value.status == status


def test_the_command_says_what_it_lacks(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "name a Python file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there is no module file"):
        main([str(tmp_path / "nowhere.py")])


@pytest.mark.parametrize(
    ("url", "is_mcp"),
    [
        ("http://host:8080", False),
        ("http://host:8080/mcp", True),
        ("http://host:8080/a/sse/", True),
        ("http://host:8080/mcpx", False),
    ],
)
def test_an_address_tells_which_protocol_it_speaks(url, is_mcp):
    assert is_mcp_address(url) is is_mcp
