"""Instances live as long as their trajectory, and every call ends in one of four ways."""

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass
from random import Random

import pytest

from tests.pace import pace
from verl.protocol.trajectory import InfraFault
from verl.tools import running
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, schema_of
from verl.tools.leases import ToolSet
from verl.tools.orphans import abandoned, unreleased
from verl.tools.outcomes import ToolOutcome, truncated
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


def short():
    """A deadline for calls that never end by themselves: enough to begin them."""
    return 0.05 * pace()


@dataclass
class Call:
    name: str
    arguments: str = "{}"
    tool_call_id: str | None = None


def schema(name):
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": name}})


def function(fn, name=None):
    name = name or fn.__name__
    return FunctionTool(name, fn, schema_of(fn, name), asyncio.iscoroutinefunction(fn))


class Counter(BaseTool):
    """Counts its calls per instance and keeps a diary."""

    def __init__(self, name="count", **config):
        super().__init__(config, schema(name))
        self.held, self.diary = {}, []

    async def create(self, instance_id=None, start=0, **kwargs):
        self.held[instance_id] = start
        self.diary.append(("create", kwargs["create_kwargs"]))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.held[instance_id] += parameters.get("by", 1)
        return ToolResponse(text=str(self.held[instance_id])), 0.5, {"n": self.held[instance_id]}

    async def calc_reward(self, instance_id, **kwargs):
        self.diary.append("calc_reward")
        return float(self.held[instance_id])

    async def release(self, instance_id, **kwargs):
        self.diary.append("release")
        del self.held[instance_id]


@pytest.fixture
def tool_set():
    made = []

    def make(*tools, **options):
        made.append(ToolSet(tools, **{"max_threads": 4, "default_timeout": 30.0, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_an_instance_lives_as_long_as_its_trajectory(tool_set):
    tool = Counter()
    tools = tool_set(tool)
    kwargs = {"count": {"create_kwargs": {"start": 10}}}
    async with tools.lease("a", kwargs) as lease, tools.lease("b") as other:
        assert lease.schemas[0]["function"]["name"] == "count"
        texts = [(await lease.call(Call("count"))).response.text for _ in range(3)]
        assert texts == ["11", "12", "13"]
        assert (await other.call(Call("count", '{"by": 5}'))).response.text == "5"
        assert len(tool.held) == 2
    assert tool.held == {}
    assert lease.rewards == {"count": 13.0}
    assert await lease.release() == {"count": 13.0}  # a second time does nothing
    assert tool.diary[0] == ("create", {"start": 10})
    assert tool.diary.count("release") == tool.diary.count("calc_reward") == 2
    assert tools.leases == set()
    with pytest.raises(RuntimeError, match="released"):
        await lease.call(Call("count"))


async def test_scope_call_creates_and_releases_around_every_call(tool_set):
    tool = Counter(scope="call")
    async with tool_set(tool).lease("a") as lease:
        assert [(await lease.call(Call("count"))).response.text for _ in range(2)] == ["1", "1"]
        assert tool.held == {}
    assert tool.diary == [("create", {}), "calc_reward", "release"] * 2
    assert lease.rewards == {"count": 2.0}


async def test_parallel_calls_of_one_instance_keep_their_order_and_make_it_once(tool_set):
    tool = Counter()
    async with tool_set(tool).lease("a") as lease:
        replies = await asyncio.gather(*(lease.call(Call("count")) for _ in range(5)))
    assert [reply.response.text for reply in replies] == ["1", "2", "3", "4", "5"]
    assert tool.diary.count(("create", {})) == 1


async def test_parallel_calls_of_a_tool_that_allows_them_run_at_once(tool_set):
    class Meeting(Counter):
        allows_parallel_calls = True

        async def execute(self, instance_id, parameters, **kwargs):
            self.diary.append("here")
            while self.diary.count("here") < 3:
                await asyncio.sleep(0)
            return ToolResponse(text="met"), 0.0, {}

    tool = Meeting()
    async with tool_set(tool).lease("a") as lease:
        replies = await asyncio.gather(*(lease.call(Call("count")) for _ in range(3)))
    assert {reply.kind for reply in replies} == {"reply"}
    assert tool.diary.count(("create", {})) == 1


def add(a: int, b: int = 1) -> str:
    return str(a + b)


def names(tool: str, method: str, seconds: int, work: str, self: str) -> str:
    return tool + method + str(seconds) + work + self


async def test_parameters_may_have_any_name(tool_set):
    given = {"tool": "a", "method": "b", "seconds": 1, "work": "c", "self": "d"}
    outcome = await tool_set(function(names)).lease("a").call(Call("names", json.dumps(given)))
    assert (outcome.kind, outcome.response.text) == ("reply", "ab1cd")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("nope"), "Unknown function 'nope'. Available tools: ['add']"),
        (Call("add", "{a: 1"), "Invalid JSON in arguments for 'add': Expecting property name"),
        (Call("add", "[1]"), "Invalid JSON in arguments for 'add': expected an object"),
        (Call("add", '{"a": NaN}'), "Invalid JSON in arguments for 'add': NaN is no JSON value"),
        (Call("add", "[" * 100_000), "Invalid JSON in arguments for 'add': "),
        (Call("add", "x" * 2_000_000), "Invalid JSON in arguments for 'add': more than"),
        (Call("add", "{}"), "Error executing tool 'add': add() missing 1 required"),
        (Call("add", '{"a": 1, "c": 2}'), "Error executing tool 'add': add() got an unexpected"),
        (Call("add", '{"a": "1"}'), "Error executing tool 'add': can only concatenate str"),
    ],
)
async def test_a_call_at_fault_is_refused_and_the_model_is_told(call, text, tool_set):
    lease = tool_set(function(add)).lease("a")
    outcome = await lease.call(call)
    assert (outcome.kind, outcome.reward) == ("refused", 0.0)
    assert outcome.response.text.startswith(text)


class Odd(BaseTool):
    """Returns or raises what it was made with."""

    def __init__(self, result):
        super().__init__({}, schema("odd"))
        self.result = result

    async def execute(self, instance_id, parameters, **kwargs):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


OK = ToolResponse(text="fine")


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        ((OK, 1, None), "reply", "fine"),
        ((ToolResponse(text="a\ud83d\ude00\udc00"), 0, {}), "reply", "a\U0001f600\ufffd"),
        ((ToolResponse.model_construct(text="\ud800"), 0, {}), "reply", "\ufffd"),
        ((ToolResponse(text="x" * 10_000_000), 0, {}), "reply", "x...(truncated)...x"),
        ((ToolResponse.model_construct(text=b"raw"), 0, {}), "infra", "text of type bytes"),
        ((b"raw", 0, {}), "infra", "response of type bytes"),
        ((OK, float("nan"), {}), "infra", "the reward nan"),
        ((OK, float("inf"), {}), "infra", "the reward inf"),
        ((OK, None, {}), "infra", "the reward None"),
        ((OK, "1", {}), "infra", "the reward '1'"),
        ((OK, 1.0), "infra", "execute returns (ToolResponse, reward, metrics)"),
        ((OK, 1.0, [1]), "infra", "metrics [1]"),
        (None, "infra", "returned None"),
        (KeyError("n"), "refused", "Error executing tool 'odd': 'n'"),
        (SystemExit(3), "refused", "Error executing tool 'odd': SystemExit(3)"),
        (asyncio.CancelledError(), "refused", "Error executing tool 'odd': CancelledError()"),
        (TimeoutError("slow"), "timeout", "Error executing tool 'odd': slow"),
        (InfraFault("the database is gone"), "infra", "the database is gone"),
        (ConnectionResetError("peer"), "infra", "ConnectionResetError: peer"),
        (OSError(24, "Too many open files"), "infra", "Too many open files"),
        (FileNotFoundError(2, "no such file"), "refused", "no such file"),
    ],
)
async def test_whatever_a_tool_returns_or_raises_has_a_name(result, kind, text, tool_set):
    async with tool_set(Odd(result), max_response_length=200).lease("a") as lease:
        outcome = await lease.call(Call("odd"))
    assert outcome.kind == kind
    assert text in outcome.response.text
    assert len(outcome.response.text) < 400
    assert outcome.reward == (1.0 if result == (OK, 1, None) else 0.0)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "reply"),
        (("a", 0.5, {"k": 1}), "reply"),
        (b"raw", "infra"),
        ((), "infra"),
        ((1, 2, 3, 4), "infra"),
        (("a", float("nan")), "infra"),
    ],
)
async def test_results_of_functions_are_checked_as_well(value, kind, tool_set):
    lease = tool_set(function(lambda: value, "give")).lease("a")
    assert (await lease.call(Call("give"))).kind == kind


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)...6789"),
        ("right", "0123...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_the_named_side_is_cut_away(side, text):
    assert truncated("0123456789", 4, side) == text
    assert truncated("0123", 4, side) == "0123"
    assert "truncated" in truncated("0123", 0, side)


def test_an_outcome_survives_json():
    response = ToolResponse(text="\u2028 ok")
    one = ToolOutcome(
        kind="reply", tool="t", response=response, reward=0.1, metrics={"a": [1]}, seconds=1.5
    )
    assert ToolOutcome.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    media = ToolOutcome(kind="reply", tool="t", response=ToolResponse(video=["x"]))
    with pytest.raises(ValueError, match="holds a video"):
        media.as_dict()


async def test_odd_metrics_become_plain_data(tool_set):
    metrics = {"t": object(), 1: float("nan"), "big": "x" * 10_000, "ok": 2}
    async with tool_set(Odd((OK, 0, metrics))).lease("a") as lease:
        outcome = await lease.call(Call("odd"))
    json.dumps(outcome.as_dict(), allow_nan=False)
    assert outcome.metrics["ok"] == 2
    assert len(outcome.metrics["big"]) <= 1000


# ---- calls that do not end -----------------------------------------------------------------------


class Hangs(Counter):
    """Waits for ever, in the way it is told to."""

    def __init__(self, how):
        super().__init__("hang", timeout=30)
        self.how, self.free = how, threading.Event()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters:
            return OK, 0.0, {}
        self.diary.append("hangs")
        if self.how == "blocks":
            self.free.wait(60)
        while True:
            try:
                await asyncio.sleep(3600 if not self.free.is_set() else 0)
            except asyncio.CancelledError:
                if self.how != "swallows" or self.free.is_set():
                    raise


class SlowToCreate(Counter):
    """Its `create` blocks for as long as it is told to."""

    def __init__(self):
        super().__init__("late", timeout=30)
        self.free, self.is_released = threading.Event(), threading.Event()

    def create(self, instance_id=None, **kwargs):
        self.free.wait(60)
        self.held[instance_id] = 0
        self.diary.append("create")
        return instance_id, OK

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        self.is_released.set()


async def test_a_blocking_create_that_ends_too_late_is_released_once(tool_set):
    tool = SlowToCreate()
    tool.config["timeout"] = short()
    lease = tool_set(tool).lease("a")
    assert (await lease.call(Call("late"))).kind == "timeout"
    assert await lease.release() == {}
    assert tool.diary == []  # there is nothing to release yet
    tool.free.set()
    assert await asyncio.to_thread(tool.is_released.wait, 60)
    assert tool.diary == ["create", "release"]
    assert tool.held == {}


@pytest.mark.parametrize("how", ["waits", "swallows", "blocks"])
async def test_an_awaited_tool_that_never_returns_ends_at_its_deadline(how, tool_set):
    tool = Hangs(how)
    tools = tool_set(tool, function(add))
    lease = tools.lease("a")
    assert (await lease.call(Call("hang", '{"not": "yet"}'))).kind == "reply"
    tool.config["timeout"] = seconds = short()
    outcome = await lease.call(Call("hang"))
    assert outcome.kind == "timeout"
    assert outcome.response.text == (f"Error executing tool 'hang': no result within {seconds:g} s")
    again = await lease.call(Call("hang"))
    assert again.kind == "timeout"
    assert ("earlier call" in again.response.text) == (how != "waits")
    sibling = await tools.lease("b").call(Call("add", '{"a": 1}'))
    assert sibling.response.text == "2"
    assert tools.num_hung == (how == "swallows")
    tool.free.set()
    await lease.release()


async def test_a_sibling_of_a_tool_that_blocks_is_infra_and_names_it(tool_set, caplog):
    blocking, patient = Hangs("blocks"), Counter("patient", timeout=short())
    tools = tool_set(blocking, patient)
    hung = asyncio.create_task(tools.lease("a").call(Call("hang")))
    while "hangs" not in blocking.diary:
        await asyncio.sleep(0)
    outcome = await tools.lease("b").call(Call("patient"))
    hung.cancel()
    assert outcome.kind == "infra"
    assert "waited for tool 'hang', which blocks" in outcome.response.text
    assert "blocks the thread that all awaited tools share" in caplog.text
    blocking.free.set()


async def test_other_calls_get_a_new_thread_when_one_stays_blocked(tool_set, monkeypatch):
    monkeypatch.setattr(running, "REPLACE_SECONDS", 0.0)
    blocking = Hangs("blocks")
    tools = tool_set(blocking, Counter())
    lease = tools.lease("a")
    assert (await lease.call(Call("hang", '{"not": "yet"}'))).kind == "reply"
    blocking.config["timeout"] = short()
    assert (await lease.call(Call("hang"))).kind == "timeout"
    async with tools.lease("b") as other:
        assert (await other.call(Call("count"))).kind == "reply"
    blocking.free.set()
    await lease.release()


async def test_hung_threads_do_not_starve_the_others_up_to_a_number(tool_set):
    free = threading.Event()

    def hang() -> str:
        free.wait(60)
        return "late"

    tools = tool_set(function(hang), function(add), max_threads=2)
    lease = tools.lease("a")
    for num_hung in (1, 2):
        tools.default_timeout = short()
        assert (await lease.call(Call("hang"))).kind == "timeout"
        assert tools.num_hung == num_hung
        tools.default_timeout = 30.0
        if num_hung == 1:
            assert (await lease.call(Call("add", '{"a": 1}'))).kind == "reply"
    outcome = await lease.call(Call("add", '{"a": 1}'))
    assert outcome.kind == "infra"
    assert "2 calls of blocking tools have not ended after their deadlines (hang)" in (
        outcome.response.text
    )
    free.set()
    while tools.num_hung:
        await asyncio.sleep(0.001)
    replies = await asyncio.gather(*(lease.call(Call("add", '{"a": 1}')) for _ in range(20)))
    assert {reply.kind for reply in replies} == {"reply"}
    while tools.threads._num_running:
        await asyncio.sleep(0.001)


async def test_at_most_so_many_blocking_calls_run_at_once(tool_set):
    running, most = [], []

    def work(n: int) -> str:
        running.append(n)
        most.append(len(running))
        time.sleep(0.001)
        running.remove(n)
        return "done"

    tools = tool_set(function(work), max_threads=3)
    lease = tools.lease("a")
    calls = [lease.call(Call("work", json.dumps({"n": n}))) for n in range(30)]
    assert {reply.kind for reply in await asyncio.gather(*calls)} == {"reply"}
    assert max(most) <= 3


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_fork_of_a_tool_does_not_come_back(is_async, tool_set):
    async def awaited() -> str:
        child = os.fork()
        await asyncio.sleep(0)
        return str(child)

    def blocking() -> str:
        return str(os.fork())

    tools = tool_set(function(awaited if is_async else blocking, "forks"))
    outcome = await tools.lease("a").call(Call("forks"))
    assert outcome.kind == "reply"
    _, status = os.waitpid(int(outcome.response.text), 0)
    assert os.WIFEXITED(status)


# ---- every exit ----------------------------------------------------------------------------------


async def test_a_cancelled_trajectory_gives_back_what_it_holds(tool_set):
    tool = Hangs("waits")
    tool.config["timeout"] = 60.0
    tools = tool_set(tool)

    async def trajectory(number):
        async with tools.lease(f"t{number}") as lease:
            await lease.call(Call("hang"))

    tasks = [asyncio.create_task(trajectory(number)) for number in range(50)]
    while len(tool.held) < 50:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert tool.held == {}
    assert tool.diary.count("release") == 50
    while tools.num_hung:
        await asyncio.sleep(0.001)


async def test_random_cancels_leave_nothing_behind(tool_set):
    class Yielding(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            await asyncio.sleep(0)
            return await super().execute(instance_id, parameters)

    shared, per_call = Yielding(), Yielding("other", scope="call")
    tools = tool_set(shared, per_call)
    random = Random(1)

    async def trajectory(number):
        async with tools.lease(f"t{number}") as lease:
            for turn in range(3):
                await lease.call(Call(("count", "other")[turn % 2]))

    async def cancelled(number):
        task = asyncio.create_task(trajectory(number))
        if number % 10:  # the others go through, however slow the machine
            for _ in range(random.randrange(40)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task}, timeout=60)

    for batch in range(5):
        await asyncio.gather(*(cancelled(40 * batch + number) for number in range(40)))
    await asyncio.to_thread(tools.close)
    for tool in (shared, per_call):
        assert tool.held == {}
        assert tool.diary.count("release") == tool.diary.count(("create", {})) > 0
        assert tools.counts[f"{tool.name}/release_fault"] == 0
    assert tools.leases == set()
    assert tools.num_hung == 0


async def test_an_instance_that_could_not_be_created_is_tried_again_and_not_released(tool_set):
    class Shy(Counter):
        async def create(self, instance_id=None, **kwargs):
            if len(self.diary) < 1:
                self.diary.append("shy")
                raise ValueError("not yet")
            return await super().create(instance_id, **kwargs)

    tool = Shy()
    async with tool_set(tool).lease("a") as lease:
        outcome = await lease.call(Call("count"))
        assert (outcome.kind, outcome.response.text) == (
            "refused",
            "Error executing tool 'count': not yet",
        )
    assert (tool.diary, lease.faults) == (["shy"], [])
    async with tool_set(tool).lease("b") as lease:
        assert (await lease.call(Call("count"))).kind == "reply"
    assert lease.faults == []


def test_closing_the_set_releases_what_a_closed_event_loop_left():
    tool = Counter()
    tools = ToolSet([tool])

    async def forgets():
        await tools.lease("a").call(Call("count"))

    asyncio.run(forgets())
    assert len(tool.held) == 1
    tools.close()
    assert tool.held == {}


async def test_a_release_that_fails_is_reported_and_stays_on_record(tool_set, tmp_path):
    class Sticky(Counter):
        async def release(self, instance_id, **kwargs):
            raise OSError("still busy")

        async def calc_reward(self, instance_id, **kwargs):
            return float("nan")

        async def reap(self, instance_id):
            self.diary.append(f"reaped {instance_id}")

    tool = Sticky()
    tools = tool_set(tool, record_folder=tmp_path)
    async with tools.lease("a") as lease:
        await lease.call(Call("count"))
    assert lease.rewards == {}
    assert [fault.split(":", 1)[1] for fault in lease.faults] == [
        " calc_reward returned nan",
        " release raised OSError('still busy')",
    ]
    assert tools.counts["count/release_fault"] == 1
    (file,) = tmp_path.iterdir()
    with abandoned(file) as is_abandoned:
        assert not is_abandoned
    tools.close()
    with abandoned(file) as is_abandoned:
        assert is_abandoned
    (orphan,) = unreleased(file)
    assert (orphan.owner, orphan.pid, orphan.tool) == ("a", os.getpid(), "count")
    assert orphan.instance_id in tool.held


async def test_a_record_without_instances_is_removed(tool_set, tmp_path):
    class Outside(Counter):
        async def reap(self, instance_id):
            pass

    tools = tool_set(Outside(), record_folder=tmp_path)
    async with tools.lease("a") as lease:
        await lease.call(Call("count"))
        assert len(list(tmp_path.iterdir())) == 1
    tools.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_row_may_select_tools(tool_set):
    tools = tool_set(function(add), Counter())
    lease = tools.lease("a", None, ["count"])
    assert [one["function"]["name"] for one in lease.schemas] == ["count"]
    assert (await lease.call(Call("add"))).kind == "refused"
    with pytest.raises(ValueError, match=r"tool_selection names \['nope'\]"):
        tools.lease("a", None, ["nope"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scope": "turn"}, "config.scope is 'turn'"),
        ({"timeout": 0}, "config.timeout is 0"),
        ({"timeout": "5"}, "config.timeout is '5'"),
    ],
)
def test_wrong_options_of_a_lease_are_refused_before_a_run(config, message):
    with pytest.raises(ValueError, match=message):
        ToolSet([Counter(**config)])
    with pytest.raises(ValueError, match="two tools have the name 'count'"):
        ToolSet([Counter(), Counter()])
