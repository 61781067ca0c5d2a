"""Tools of real MCP servers, over each transport, and servers that are lost."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from verl.config.rollout import MultiTurnConfig
from verl.protocol.trajectory import InfraFault
from verl.tools.leases import ToolSet
from verl.tools.mcp_base_tool import MCPBaseTool, RateLimit
from verl.tools.mcp_search_tool import MCPSearchTool
from verl.tools.mcp_spec import read_servers
from verl.tools.parsers import FunctionCall
from verl.tools.tool_registry import initialize_tools_from_config, make_tool_set
from verl.utils.processes import supervised

pytest.importorskip("mcp")
SERVER = str(Path(__file__).parent / "mcp_server.py")
PYTHON = os.environ.get("VERL_MCP_SERVER_PYTHON", sys.executable)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Remote:
    """A server with a URL, that can be killed and started again on its port."""

    def __init__(self, transport):
        self.transport = transport
        self.port = free_port()
        path = {"sse": "/sse", "streamable-http": "/mcp"}[transport]
        self.url = f"http://127.0.0.1:{self.port}{path}"
        self.start()

    def start(self):
        command = [PYTHON, SERVER, self.transport, str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server does not start"
                time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def remotes():
    servers = {}

    def get(transport):
        if transport not in servers:
            servers[transport] = Remote(transport)
        return servers[transport]

    yield get
    for server in servers.values():
        server.kill()


def tools_of(folder, server, *, cls=MCPBaseTool, selection=None, **config):
    """The tools of a server, by name, as a file of tools has them."""
    servers = folder / f"servers{len(list(folder.iterdir()))}.json"
    servers.write_text(json.dumps({"mcpServers": {"test": server}}))
    mcp = {"mcp_servers_config_path": str(servers)}
    if selection is not None:
        mcp["tool_selected_list"] = selection
    entry = {
        "class_name": f"{cls.__module__}.{cls.__qualname__}",
        "config": {"type": "mcp", **config},
        "mcp": mcp,
    }
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    return {tool.name: tool for tool in initialize_tools_from_config(str(file))}


STDIO = {"command": PYTHON, "args": [SERVER], "env": {"GIVEN": "yes"}}


@pytest.fixture(scope="module")
def stdio_tools(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOT_GIVEN", "a secret")
        tools = tools_of(tmp_path_factory.mktemp("stdio"), STDIO, timeout=60)
    yield tools
    for tool in tools.values():
        tool.close()


async def answer(tool, **arguments):
    response, reward, _ = await tool.execute("instance", arguments)
    assert reward == 0.0
    return response


@pytest.mark.parametrize("transport", ["stdio", "sse", "streamable-http"])
async def test_tools_are_found_and_called(transport, remotes, stdio_tools, tmp_path):
    if transport == "stdio":
        tools = stdio_tools
    else:
        tools = tools_of(tmp_path, {"url": remotes(transport).url}, timeout=60)
    offered = tools["add"].tool_schema.offered()["function"]
    assert offered["description"] == "Add two numbers."
    assert offered["parameters"]["required"] == ["a"]
    assert offered["parameters"]["properties"]["b"]["default"] == 1
    assert (await answer(tools["add"], a=2, b=3)).text == "5"
    assert (await answer(tools["fail"], reason="no")).text == "Error executing tool fail: no"
    replies = await asyncio.gather(*(answer(tools["add"], a=n) for n in range(20)))
    assert [reply.text for reply in replies] == [str(n + 1) for n in range(20)]
    if transport != "stdio":
        for tool in tools.values():
            tool.close()


@pytest.mark.parametrize("transport", ["sse", "streamable-http"])
async def test_the_address_of_a_tool_server_may_be_that_of_an_mcp_server(transport, remotes):
    tool_set = make_tool_set(MultiTurnConfig(tool_server=remotes(transport).url))
    assert (await answer(tool_set.tools["add"], a=2, b=3)).text == "5"
    for tool in tool_set.tools.values():
        tool.close()
    tool_set.close()


async def test_what_a_result_holds(stdio_tools):
    picture = await answer(stdio_tools["picture"])
    assert picture.text == "two pixels"
    assert picture.image[0].size == (2, 1)
    assert len((await answer(stdio_tools["long"], size=1_200_000)).text) == 1_000_000


async def test_bad_arguments_are_told_to_the_model(stdio_tools):
    async with ToolSet([stdio_tools["add"]]).lease("row") as lease:
        outcome = await lease.call(FunctionCall(name="add", arguments='{"a": "x"}'))
        assert outcome.kind == "reply"
        assert outcome.response.text.startswith("Error executing tool add: 1 validation error")


async def test_a_server_sees_little_of_our_environment(stdio_tools):
    assert (await answer(stdio_tools["variable"], name="GIVEN")).text == "yes"
    assert (await answer(stdio_tools["variable"], name="NOT_GIVEN")).text == "<unset>"
    assert (await answer(stdio_tools["variable"], name="PATH")).text == os.environ["PATH"]


async def test_one_connection_serves_all_event_loops(stdio_tools):
    here = (await answer(stdio_tools["pid"])).text
    there = await asyncio.to_thread(lambda: asyncio.run(answer(stdio_tools["pid"])).text)
    assert here == there


async def test_a_slow_call_times_out_and_others_do_not(stdio_tools):
    before = (await answer(stdio_tools["pid"])).text
    hasty = MCPBaseTool({"timeout": 0.5}, stdio_tools["wait"].tool_schema)
    hasty.server = stdio_tools["wait"].server
    with pytest.raises(TimeoutError, match=r"no result within 0\.45 s"):
        await answer(hasty, seconds=1000)
    assert (await answer(stdio_tools["pid"])).text == before


# ---- servers that are lost -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def fragile_tools(tmp_path_factory):
    server = {**STDIO, "env": {"FRAGILE": "yes"}}
    return tools_of(tmp_path_factory.mktemp("fragile"), server, timeout=60, stateful=True)


async def error_when_killed(tools, tmp_path, kill):
    """The error of a call whose server is killed when it has begun."""
    mark = tmp_path / "mark"
    call = asyncio.create_task(answer(tools["wait"], seconds=1000, mark=str(mark)))
    while not (mark.exists() and mark.read_text()):
        assert not call.done(), call
        await asyncio.sleep(0.01)
    kill(int(mark.read_text()))
    with pytest.raises(InfraFault) as caught:
        await call
    return str(caught.value)


async def test_a_stdio_server_that_is_killed_comes_back(fragile_tools, tmp_path):
    pid = fragile_tools["pid"]
    first = (await answer(pid)).text
    error = await error_when_killed(
        fragile_tools, tmp_path, lambda number: os.kill(number, signal.SIGKILL)
    )
    assert error == "MCP server 'test' was lost during a call of wait"
    response, _, _ = await pid.execute("another trajectory", {})
    assert response.text != first
    with pytest.raises(InfraFault, match="with it the state of the trajectory"):
        await answer(pid)


async def test_a_server_that_hangs_is_replaced(fragile_tools):
    hasty = MCPBaseTool({"timeout": 0.3}, fragile_tools["block"].tool_schema)
    hasty.server = fragile_tools["block"].server
    first, _, _ = await fragile_tools["pid"].execute("before", {})
    with pytest.raises(TimeoutError):
        await answer(hasty, seconds=1000)
    with pytest.raises(InfraFault):  # in the queue of the server that hangs
        await fragile_tools["pid"].execute("during", {})
    last, _, _ = await fragile_tools["pid"].execute("after", {})
    assert last.text != first.text


async def test_a_server_ends_when_its_last_tool_is_closed(fragile_tools):
    response, _, _ = await fragile_tools["pid"].execute("last", {})
    *others, last = fragile_tools.values()
    for tool in others:
        tool.close()
    assert is_alive(int(response.text))
    last.close()
    assert not is_alive(int(response.text))
    with pytest.raises(InfraFault, match="has no server"):
        await answer(last)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("transport", ["sse", "streamable-http"])
async def test_a_remote_server_that_is_killed_comes_back(transport, remotes, tmp_path):
    remote = remotes(transport)
    tools = tools_of(tmp_path, {"url": remote.url}, selection=["pid", "wait"], timeout=20)
    await error_when_killed(tools, tmp_path, lambda _: remote.kill())
    with pytest.raises(InfraFault):
        await answer(tools["pid"])
    remote.start()
    assert (await answer(tools["pid"])).text == str(remote.process.pid)
    for tool in tools.values():
        tool.close()


@pytest.mark.parametrize("transport", ["sse", "streamable-http"])
async def test_a_message_that_is_too_long_is_not_collected(
    transport, remotes, tmp_path, monkeypatch
):
    monkeypatch.setattr("verl.tools.mcp_client.MAX_MESSAGE_BYTES", 100_000)
    tools = tools_of(tmp_path, {"url": remotes(transport).url}, timeout=30)
    assert len((await answer(tools["long"], size=40_000)).text) == 40_000
    with pytest.raises(InfraFault, match="was lost during a call of long"):
        await answer(tools["long"], size=1_000_000)
    for _ in range(3):  # messages before this one do not count
        assert len((await answer(tools["long"], size=60_000)).text) == 60_000
    for tool in tools.values():
        tool.close()


PARENT = """
import os, subprocess, sys, time
from verl.utils.processes import supervised
program = (
    "import os, subprocess, sys, time; "
    "child = subprocess.Popen(['sleep', '1000'], start_new_session=True); "
    "print(os.getpid(), child.pid, flush=True); time.sleep(1000)"
)
line = supervised([sys.executable, "-c", program], max_line_bytes=1000, max_stderr_bytes=1000)
subprocess.Popen(line, start_new_session=True)
time.sleep(1000)
"""


def test_a_supervised_program_ends_with_its_parent_and_takes_its_children_along():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert all(map(is_alive, pids))
        parent.kill()
    while any(map(is_alive, pids)):  # the time-out of the test is the limit
        time.sleep(0.01)


def test_a_supervised_program_that_writes_without_end_is_ended(tmp_path):
    program = "import sys; sys.stdout.write('x\\n'); sys.stdout.write('x' * 10_000_000)"
    line = supervised([sys.executable, "-c", program], max_line_bytes=1 << 20, max_stderr_bytes=99)
    ended = subprocess.run(line, capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stdout.startswith("x\n")
    assert len(ended.stdout) <= (1 << 20) + 2
    assert ended.stderr == "a line of output has more than 1048576 bytes\n"


TRAINER = """
import asyncio, sys, time
from verl.tools.tool_registry import initialize_tools_from_config
tools = {tool.name: tool for tool in initialize_tools_from_config(sys.argv[1])}
print(asyncio.run(tools["pid"].execute("instance", {}))[0].text, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_stdio_server_ends_with_a_trainer_that_is_killed(tmp_path):
    for tool in tools_of(tmp_path, STDIO, selection=["pid"]).values():
        tool.close()
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "tools.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid = int(trainer.stdout.readline())
        assert is_alive(pid)
        trainer.kill()
    while is_alive(pid):
        time.sleep(0.01)


PACKAGE = "@modelcontextprotocol/server-everything"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_reference_server_of_npm(tmp_path):
    npm = shutil.which("npm")
    if npm is None or subprocess.run([npm, "view", PACKAGE, "version"], timeout=120).returncode:
        pytest.skip(f"{PACKAGE} needs npm and a registry")
    server = {"command": "npx", "args": ["-y", PACKAGE], "start_timeout": 300}
    tools = tools_of(tmp_path, server, timeout=60)
    assert (await answer(tools["echo"], message="hello")).text == "Echo: hello"
    assert "5" in (await answer(tools["get-sum"], a=2, b=3)).text
    with pytest.raises(InfraFault, match="cannot be read"):  # its checksum is wrong
        await answer(tools["get-tiny-image"])
    for tool in tools.values():
        tool.close()


async def test_a_rate_limit_spreads_calls():
    limit = RateLimit(50)
    start = time.monotonic()
    await asyncio.gather(*(limit.turn() for _ in range(6)))
    assert time.monotonic() - start >= 5 / 50


async def test_hits_of_a_search_are_counted(stdio_tools):
    tool = MCPSearchTool({}, stdio_tools["long"].tool_schema)
    tool.server = stdio_tools["long"].server
    response, _, metrics = await tool.execute("instance", {"size": 3})
    assert (response.text, metrics) == ("xxx", {"status": "success", "total_results": 1})


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "/no/such/program"}, "/no/such/program: No such file"),
        ({"command": PYTHON, "args": ["-c", "import sys; sys.exit('not today')"]}, "not today"),
        ({"command": "sleep", "args": ["1000"], "start_timeout": 0.3}, r"not answer within 0\.3"),
        ({"url": "ftp://x"}, "begins with http"),
        ({"url": "http://x", "command": "y"}, "either url or command"),
        ({"url": "http://x", "comand": "y"}, "'comand'.*nobody reads"),
        ({"command": "y", "transport": "sse"}, "transport is 'sse'"),
        ({"command": "y", "args": "z"}, "args must be a list"),
    ],
)
def test_servers_that_cannot_be_are_refused(server, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tools_of(tmp_path, server)


def test_selected_tools_must_exist(stdio_tools, tmp_path):
    assert stdio_tools, "the server is shared"
    with pytest.raises(ValueError, match=r"names 'ad'.*did you mean add\? Known: add, block"):
        tools_of(tmp_path, STDIO, selection=["ad"])


def test_secrets_stay_out_of_messages(tmp_path):
    file = tmp_path / "servers.json"
    servers = {"a": {"url": "http://u:pw@host:1/sse?key=k", "auth_token": "t0k3n"}}
    file.write_text(json.dumps({"mcpServers": servers}))
    spec = read_servers(str(file))["a"]
    assert spec.transport == "sse"
    assert spec.headers == {"Authorization": "Bearer t0k3n"}
    assert spec.shown == "http://host:1/sse"
    assert "t0k3n" not in repr(spec)
