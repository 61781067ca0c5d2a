"""Tools held by trajectories: instances with an owner, deadlines, and outcomes with a type.

    ToolSet (one per run) --lease(owner)--> ToolLease (one per trajectory) --call--> ToolOutcome
                                               | creates an instance at the first call of a tool
                                               + releases every instance once, however it ends

What runs, runs on threads of its own (`running`); what comes back is read in `outcomes`.
"""

import asyncio
import inspect
import json
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl.tools.base_tool import SCOPES, BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.orphans import InstanceRecord
from verl.tools.outcomes import (
    TRUNCATE_SIDES,
    BadResult,
    OutcomeKind,
    ToolOutcome,
    checked_result,
    is_reward,
    kind_of,
    truncated,
)
from verl.tools.running import DeadlineExceeded, Threads, ToolLoop
from verl.tools.schemas import ToolResponse

logger = logging.getLogger(__name__)

Tool = BaseTool | FunctionTool
MAX_ARGUMENT_CHARS = 1_000_000


class Call(Protocol):
    """What a parser found: `arguments` is text that should be a JSON object."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


@dataclass(eq=False)
class Instance:
    """One instance of a tool in a lease."""

    tool: BaseTool
    id: str
    kwargs: Mapping[str, Any]
    """What the row's `tools_kwargs` hold for this tool."""
    is_begun: bool = False
    """`create` was called for, so the instance may hold something."""
    is_entered: bool = False
    """`create` began to run, which a call that was cancelled early never does."""
    is_ready: bool = False
    is_stuck: bool = False
    """A call was abandoned and may still be running."""
    is_released: bool = False
    is_creating: bool = False
    """A blocking `create` runs, perhaps beyond its deadline."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class ToolSet:
    """The tools of a run, where they run, and what became of their calls."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_threads: int = 64,
        default_timeout: float = 60.0,
        max_response_length: int = 256,
        truncate_side: str = "middle",
        record_folder: str | Path | None = None,
    ) -> None:
        if truncate_side not in TRUNCATE_SIDES:
            raise ValueError(f"truncate_side is {truncate_side!r}; choose from {TRUNCATE_SIDES}")
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ValueError(f"two tools have the name {tool.name!r}; rename one of them")
            check_options(tool)
            self.tools[tool.name] = tool
        self.default_timeout = default_timeout
        self.max_response_length = max_response_length
        self.truncate_side = truncate_side
        self.counts: Counter[str] = Counter()
        """`"{tool}/{kind}"` of every call, `"{tool}/release_fault"` of instances not released."""
        self.threads = Threads(max_threads)
        self.tool_loop = ToolLoop()
        self.keeper = ToolLoop()
        """Releases instances, so that nobody's event loop has to live for that."""
        self.lock = threading.Lock()
        self.record = None if record_folder is None else InstanceRecord(Path(record_folder))
        self.leases: set[ToolLease] = set()
        """Those that hold, or may come to hold, instances."""
        self._told: set[tuple[str, str]] = set()

    @property
    def num_hung(self) -> int:
        """Calls that were abandoned and still run."""
        return len(self.threads.hung) + len(self.tool_loop.hung)

    def lease(
        self,
        owner: str,
        tools_kwargs: Mapping[str, Any] | None = None,
        selection: Sequence[str] | None = None,
    ) -> "ToolLease":
        """The tools of one trajectory; `selection` (the row's `tool_selection`) offers fewer."""
        names = list(self.tools)
        if selection is not None:
            unknown = [name for name in selection if name not in self.tools]
            if unknown:
                raise ValueError(
                    f"tool_selection names {unknown}; the tools of this run are {names}"
                )
            names = [name for name in names if name in set(selection)]
        return ToolLease(self, owner, tools_kwargs or {}, names)

    def timeout_of(self, tool: Tool) -> float:
        stated = tool.config.get("timeout") if isinstance(tool, BaseTool) else None
        return self.default_timeout if stated is None else float(stated)

    async def run(self, tool: str, work: Callable[[], Any], seconds: float) -> Any:
        """Call code of a tool where it belongs, for at most `seconds`."""
        if seconds <= 0:
            raise DeadlineExceeded
        place = self.tool_loop if inspect.iscoroutinefunction(work) else self.threads
        return await place.run(tool, work, seconds)

    def told(self, tool: str, error: BaseException) -> None:
        """Log the first exception of a kind with its traceback; the rest are counted."""
        key = (tool, type(error).__qualname__)
        if key not in self._told:
            self._told.add(key)
            logger.warning("tool %r raised; more of these are only counted", tool, exc_info=error)

    def close(self) -> None:
        """Release what is still held and end the threads; not on the event loop of the callers."""
        seconds = 3 * max([self.default_timeout, *map(self.timeout_of, self.tools.values())])
        wait([lease.start_release() for lease in list(self.leases)], timeout=seconds)
        self.keeper.close()
        self.tool_loop.close()
        for tool in self.tools.values():
            if isinstance(tool, BaseTool):
                tool.close()
        if self.record is not None:
            self.record.close()


class ToolLease:
    """What one trajectory holds; used on one event loop, as an async context manager or not."""

    def __init__(
        self, tool_set: ToolSet, owner: str, tools_kwargs: Mapping[str, Any], names: list[str]
    ) -> None:
        self.owner = owner
        self.names = names
        self.rewards: dict[str, float] = {}
        """`calc_reward` of each tool that defines it, once the lease is released."""
        self.faults: list[str] = []
        """What went wrong while releasing."""
        self.score_fault: str | None = None
        """Why `calc_reward` of a tool gave no score, if it gave none."""
        self._set = tool_set
        self._kwargs = tools_kwargs
        self._instances: dict[str, Instance] = {}
        self._releasing: Future[None] | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools offered to this row, as chat templates take them."""
        return [self._set.tools[name].tool_schema.offered() for name in self.names]

    async def __aenter__(self) -> "ToolLease":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    # ---- calls -----------------------------------------------------------------------------------

    async def call(self, call: Call, agent_data: Any = None) -> ToolOutcome:
        """Run one call of the model. Every fault becomes an outcome; only cancellation raises."""
        if self._releasing is not None:
            raise RuntimeError(f"the tools of {self.owner!r} are released; they take no calls")
        begin = time.monotonic()
        reward, metrics, response = 0.0, {}, ToolResponse()
        kind: OutcomeKind
        try:
            tool, arguments = self._read(call)
            result = await self._answer(tool, arguments, agent_data)
            response, reward, metrics = checked_result(tool.name, result)
            kind, text = "reply", response.text
        except Refused as error:
            kind, text = "refused", str(error)
        except Exception as error:
            kind, text = self._meaning(call.name, error)
        response = self._shortened(response, text, kind)
        self._set.counts[f"{call.name if call.name in self._set.tools else '?'}/{kind}"] += 1
        return ToolOutcome(
            kind=kind,
            tool=call.name,
            response=response,
            reward=reward,
            metrics=metrics,
            seconds=time.monotonic() - begin,
        )

    def _read(self, call: Call) -> tuple[Tool, dict[str, Any]]:
        if call.name not in self.names:
            raise Refused(f"Unknown function '{call.name}'. Available tools: {self.names}")
        problem = f"Invalid JSON in arguments for '{call.name}'"
        if len(call.arguments) > MAX_ARGUMENT_CHARS:
            raise Refused(f"{problem}: more than {MAX_ARGUMENT_CHARS} characters")
        try:
            arguments = json.loads(call.arguments, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{problem}: {error}") from error
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise Refused(f"{problem}: expected an object with the parameters, got {kind}")
        return self._set.tools[call.name], arguments

    async def _answer(self, tool: Tool, arguments: dict[str, Any], agent_data: Any) -> Any:
        seconds = self._set.timeout_of(tool)
        if isinstance(tool, FunctionTool):
            returned = await self._set.run(tool.name, partial(tool.fn, **arguments), seconds)
            try:
                return normalize_function_tool_return(returned)
            except (TypeError, ValueError) as error:
                raise BadResult(f"tool {tool.name!r}: {error}") from error
        if scope_of(tool) == "call":
            instance = self._new_instance(tool, f"{tool.name}#{len(self._instances)}")
            try:
                return await self._use(instance, arguments, agent_data, seconds)
            finally:
                ended = self._set.keeper.start(self._give_back(instance))
                await asyncio.shield(asyncio.wrap_future(ended))
        instance = self._instances.get(tool.name) or self._new_instance(tool, tool.name)
        if tool.allows_parallel_calls and instance.is_ready:
            return await self._use(instance, arguments, agent_data, seconds)
        async with instance.turn:
            if not tool.allows_parallel_calls:
                return await self._use(instance, arguments, agent_data, seconds)
            begin = time.monotonic()
            await self._create(instance, seconds)
            seconds -= time.monotonic() - begin
        return await self._use(instance, arguments, agent_data, seconds)

    def _new_instance(self, tool: BaseTool, key: str) -> Instance:
        instance = Instance(tool, uuid.uuid4().hex, self._kwargs.get(tool.name) or {})
        self._instances[key] = instance
        self._set.leases.add(self)
        return instance

    async def _use(
        self, instance: Instance, arguments: dict[str, Any], agent_data: Any, seconds: float
    ) -> Any:
        tool = instance.tool
        if instance.is_stuck:
            raise TimeoutError("an earlier call has not ended")
        begin = time.monotonic()
        await self._create(instance, seconds)
        kwargs = {**(instance.kwargs.get("execute_kwargs") or {}), "agent_data": agent_data}
        seconds -= time.monotonic() - begin
        try:
            work = partial(tool.execute, instance.id, arguments, **kwargs)
            return await self._set.run(tool.name, work, seconds)
        except DeadlineExceeded as error:
            instance.is_stuck = not error.has_ended
            raise

    async def _create(self, instance: Instance, seconds: float) -> None:
        if instance.is_ready:
            return
        tool = instance.tool
        record = self._set.record if type(tool).reap is not BaseTool.reap else None
        if record is not None:
            record.created(self.owner, tool.name, instance.id)
        instance.is_begun = True
        given = dict(instance.kwargs.get("create_kwargs") or {})
        parameters = inspect.signature(tool.create).parameters
        named = {name: value for name, value in given.items() if name in parameters}
        kwargs = {**named, "instance_id": instance.id, "create_kwargs": given}

        async def create() -> Any:
            instance.is_entered = True
            return await tool.create(**kwargs)

        def create_blocking() -> Any:
            with self._set.lock:
                if instance.is_released:
                    return None
                instance.is_creating = True
            try:
                made = tool.create(**kwargs)
            except BaseException:
                instance.is_creating = False
                raise
            with self._set.lock:
                instance.is_creating, is_late = False, instance.is_released
            if is_late:
                self._release_late(instance, made)
            return made

        is_awaited = inspect.iscoroutinefunction(tool.create)
        instance.is_entered = not is_awaited
        try:
            made = await self._set.run(
                tool.name, create if is_awaited else create_blocking, seconds
            )
        except DeadlineExceeded:
            raise
        except Exception:  # like a constructor that raises, it holds nothing
            instance.is_begun = False
            raise
        made_id = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(made_id, str):
            raise BadResult(
                f"tool {tool.name!r}: create returned {made!r:.200}; return (id, ToolResponse())"
            )
        if record is not None and made_id != instance.id:
            record.created(self.owner, tool.name, made_id)
            record.released(tool.name, instance.id)
        instance.id = made_id
        instance.is_ready = True

    def _meaning(self, name: str, error: BaseException) -> tuple[OutcomeKind, str]:
        """What an exception of a tool means, and the text for it."""
        if isinstance(error, DeadlineExceeded):
            seconds = self._set.timeout_of(self._set.tools[name])
            return "timeout", f"Error executing tool '{name}': no result within {seconds:g} s"
        reason = str(error) or type(error).__name__
        kind = kind_of(error)
        if kind != "timeout":
            self._set.told(name, error)
        if kind == "infra":
            return kind, f"tool {name!r}: {type(error).__name__}: {reason}"
        return kind, f"Error executing tool '{name}': {reason}"

    def _shortened(self, response: ToolResponse, text: str | None, kind: str) -> ToolResponse:
        if text is not None and kind != "infra":
            text = truncated(text, self._set.max_response_length, self._set.truncate_side)
        return ToolResponse(text=text, image=response.image, video=response.video)

    # ---- the end ---------------------------------------------------------------------------------

    async def release(self) -> dict[str, float]:
        """Score and release every instance, once; the rewards. Cancelling the caller, or closing
        its event loop, does not stop it."""
        releasing = self.start_release()
        if not releasing.done():
            await asyncio.shield(asyncio.wrap_future(releasing))
        return self.rewards

    def start_release(self) -> "Future[None]":
        with self._set.lock:
            if self._releasing is None:
                self._releasing = Future()
                if self._instances:
                    self._releasing = self._set.keeper.start(self._release_instances())
                else:
                    self._releasing.set_result(None)
            return self._releasing

    async def _release_instances(self) -> None:
        await asyncio.gather(*(self._give_back(one) for one in list(self._instances.values())))
        self._set.leases.discard(self)

    async def _give_back(self, instance: Instance) -> None:
        if instance.is_released or not instance.is_begun:
            return
        with self._set.lock:
            instance.is_released = True
            if instance.is_creating:
                return  # the thread that creates it releases it
        tool = instance.tool
        if type(tool).calc_reward is not BaseTool.calc_reward:
            num_faults = len(self.faults)
            reward = await self._finish(instance, tool.calc_reward, "calc_reward")
            if is_reward(reward):
                self.rewards[tool.name] = self.rewards.get(tool.name, 0.0) + float(reward)
            elif len(self.faults) == num_faults:
                self.faults.append(f"tool {tool.name!r}: calc_reward returned {reward!r:.200}")
            if len(self.faults) > num_faults:
                self.score_fault = self.faults[-1]
        num_faults = len(self.faults)
        await self._finish(instance, tool.release, "release")
        if len(self.faults) > num_faults:
            self._set.counts[f"{tool.name}/release_fault"] += 1
        elif self._set.record is not None and type(tool).reap is not BaseTool.reap:
            self._set.record.released(tool.name, instance.id)

    def _release_late(self, instance: Instance, made: Any) -> None:
        """On the thread of a `create` that ended when nobody waited for it any more."""
        tool = instance.tool
        made_id = made[0] if isinstance(made, tuple) and made else made
        kwargs = dict(instance.kwargs.get("release_kwargs") or {})
        try:
            ended = tool.release(made_id if isinstance(made_id, str) else instance.id, **kwargs)
            if inspect.isawaitable(ended):
                asyncio.run(awaited(ended))
        except Exception as error:
            self._set.told(tool.name, error)
            self._set.counts[f"{tool.name}/release_fault"] += 1
            return
        if self._set.record is not None and type(tool).reap is not BaseTool.reap:
            self._set.record.released(tool.name, instance.id)

    async def _finish(self, instance: Instance, method: Callable[..., Any], name: str) -> Any:
        """Call `calc_reward` or `release`, where `create` was called before.

        Calls that are coroutines begin in the order they are made, so whether a cancelled `create`
        began to run is known when this one does.
        """
        tool = instance.tool
        kwargs = dict(instance.kwargs.get(f"{name}_kwargs") or {})
        seconds = self._set.timeout_of(tool)

        async def finish() -> Any:
            return await method(instance.id, **kwargs) if instance.is_entered else None

        is_awaited = inspect.iscoroutinefunction(method)
        work = finish if is_awaited else partial(method, instance.id, **kwargs)
        try:
            return await self._set.run(tool.name, work, seconds)
        except DeadlineExceeded:
            self.faults.append(f"tool {tool.name!r}: {name} took longer than {seconds:g} s")
        except Exception as error:
            self._set.told(tool.name, error)
            self.faults.append(f"tool {tool.name!r}: {name} raised {error!r}")
        return None


class Refused(ValueError):
    """A call that reaches no tool; the text is for the model."""


async def awaited(work: Awaitable[Any]) -> Any:
    return await work


def check_options(tool: Tool) -> None:
    """`config.scope` and `config.timeout` belong to leases; the rest is the tool's."""
    if isinstance(tool, FunctionTool):
        return
    scope_of(tool)
    timeout = tool.config.get("timeout")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise ValueError(
            f"tool {tool.name!r}: config.timeout is {timeout!r}; it must be a number of seconds "
            "above 0, or absent for rollout.multi_turn.tool_timeout_seconds"
        )


def scope_of(tool: BaseTool) -> str:
    scope = tool.config.get("scope") or "trajectory"
    if scope not in SCOPES:
        raise ValueError(
            f"tool {tool.name!r}: config.scope is {scope!r}; choose trajectory (one instance per "
            "trajectory) or call (one per call)"
        )
    return scope


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
