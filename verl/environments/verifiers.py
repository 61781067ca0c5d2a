"""Environments of the package `verifiers`, which drive a model themselves.

    reset   rollout(example, client) starts, and asks the client for the first turn of the model
    step    the client answers with the action; the rollout goes on until it asks again, or ends
    end     the environment's rubric scores the rollout

The rollout is a task of this process's event loop, which runs only while `reset`, `step` or `close`
does: between them it waits in its client. Everything that an environment overrides (`setup_state`,
`env_response`, stop conditions, clean-up, tools) is run by the package's own code.

The package is imported when one of its environments is made; its interpreter needs nothing else.
"""

import asyncio
import importlib.metadata
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.environments.base import Action, BadEnvironment, Environment, InvalidAction, Observation
from verl.utils.import_utils import is_available, require

OLDEST, TOO_NEW = (0, 1, 14), (0, 3)
"""Versions whose environments have `rollout` with a client, in the place where we look for it."""


@dataclass(frozen=True)
class Request:
    """What a rollout asks of the model, and where it waits for the answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: "asyncio.Future[Any]"


class ModelSeat:
    """The client of a rollout: whoever answers what is `asked` is the model."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[Request] = asyncio.get_running_loop().create_future()

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> Any:
        messages = [as_plain(message) for message in prompt]
        offered = [
            {"type": "function", "function": tool.model_dump(exclude_none=True)}
            for tool in tools or ()
        ]
        if self.asked.done():
            raise BadEnvironment("the environment asks the model for two turns at the same time")
        answer = asyncio.get_running_loop().create_future()
        self.asked.set_result(Request(messages, offered, answer))
        return await answer

    def reply(self, request: Request, response: Any) -> None:
        self.asked = asyncio.get_running_loop().create_future()
        request.answer.set_result(response)

    async def close(self) -> None:
        """Nothing is held."""


class VerifiersEnvironment(Environment):
    """`verifiers:<name>`, or `verifiers:path/to/file.py` with a function `load_environment`.

    `kwargs` are those of `load_environment`, and `use_eval_dataset` to play the examples of the
    environment's evaluation set. The example is `extra_info.example` of the row, or else the seed,
    counted round the dataset.
    """

    def __init__(self, name: str, *, use_eval_dataset: bool = False, **kwargs: Any) -> None:
        if not is_available("verifiers"):
            raise ImportError(
                f"{sys.executable} has no package verifiers. It wants an interpreter of its own: "
                "python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install "
                "verifiers==0.1.14, and env.python=.venv-verifiers/bin/python"
            )
        package = require("verifiers")
        check_version(importlib.metadata.version("verifiers"))
        self._name = name
        self._world: Any = loaded(package, name, kwargs)
        self._use_eval_dataset = use_eval_dataset
        self._seat: ModelSeat | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._request: Request | None = None
        self._num_turns = 0

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._request.tools if self._request else ()

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        get = self._world.get_eval_dataset if self._use_eval_dataset else self._world.get_dataset
        dataset = get()
        stated = (row.get("extra_info") or {}).get("example")
        if stated is not None and not 0 <= int(stated) < len(dataset):
            raise BadEnvironment(
                f"extra_info.example is {stated}; {self._name} has {len(dataset)} examples"
            )
        number = seed % len(dataset) if stated is None else int(stated)
        self._seat = ModelSeat()
        self._rollout = asyncio.ensure_future(self._play(dict(dataset[number]), self._seat))
        self._request = await self._next_request(self._seat, self._rollout)
        if self._request is None:
            state = await self._rollout
            raise RuntimeError(
                f"example {number} of {self._name} ended before the model's first turn: "
                f"{state.get('error')!r}, stop condition {state.get('stop_condition')}"
            )
        return Observation(messages=self._request.messages)

    async def step(self, action: Action) -> Observation:
        asked, seat, rollout = self._request, self._seat, self._rollout
        assert asked is not None, "the episode is over"
        assert seat is not None
        assert rollout is not None
        wrong = [call.error for call in action.tool_calls if call.error]
        if wrong:
            raise InvalidAction("\n".join(wrong))
        response = self._response(action)
        seat.reply(asked, response)
        self._request = await self._next_request(seat, rollout)
        if self._request is None:
            return self._end(await rollout)
        history = [*asked.messages, as_plain(response.message)]
        messages = self._request.messages
        if messages[: len(history)] != history:
            raise BadEnvironment(
                f"{self._name} changed what was said before: after {history[-2:]!r:.500} it shows "
                f"{messages[-2:]!r:.500}. A trajectory is trained as one sequence, so only new "
                "messages can be added (get_prompt_messages of the environment does otherwise)"
            )
        if self._request.tools != asked.tools:
            raise BadEnvironment(
                f"{self._name} offers other tools after turn {self._num_turns}; they must stay as "
                "they were in the first turn, whose prompt describes them"
            )
        return Observation(messages=messages[len(history) :], reward=0.0)

    async def close(self) -> None:
        """Cancel the rollout, if it is not over: its clean-up runs."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})

    async def _play(self, example: dict[str, Any], seat: ModelSeat) -> Any:
        state = await self._world.rollout(example, seat, "policy", {})
        error = state.get("error")
        if error is not None and not isinstance(error, require("verifiers.errors").ToolError):
            raise RuntimeError(f"{self._name} ended with {error!r}") from error
        await self._world.rubric.score_rollout(state)
        await self._world.rubric.cleanup(state)
        return state

    async def _next_request(self, seat: ModelSeat, rollout: "asyncio.Task[Any]") -> Request | None:
        """What the rollout asks next; None when it is over. Its exception, if it has one."""
        await asyncio.wait({seat.asked, rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not rollout.done():
            return await seat.asked
        await rollout
        return None

    def _response(self, action: Action) -> Any:
        types: Any = require("verifiers.types")
        self._num_turns += 1
        calls = [
            types.ToolCall(
                id=f"call_{self._num_turns}_{number}",
                name=call.name,
                arguments=json.dumps(dict(call.arguments)),
            )
            for number, call in enumerate(action.tool_calls)
        ]
        message = types.ResponseMessage(
            content=str(action),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(
            id=f"turn {self._num_turns}", created=0, model="policy", message=message
        )

    def _end(self, state: Any) -> Observation:
        said = [as_plain(message) for message in state["completion"] or ()]
        spoken = [number for number, one in enumerate(said) if one["role"] == "assistant"]
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        info = {
            "stop_condition": str(state.get("stop_condition")),
            "is_truncated": bool(state.get("is_truncated")),
            "metrics": metrics,
        }
        return Observation(
            messages=said[spoken[-1] + 1 :] if spoken else [],
            reward=float(state["reward"]),
            done=True,
            info=info,
        )


_loaded: dict[str, Any] = {}
"""The environment that this process has loaded, by name and arguments. Rollouts keep what is theirs
in their state, so the next one may have the same."""


def loaded(package: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    key = json.dumps([name, kwargs], sort_keys=True)
    if key not in _loaded:
        require("verifiers.clients").Client.register(ModelSeat)
        if name.endswith(".py"):
            file = Path(name).expanduser().resolve()
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {str(file)!r}")
            sys.path.insert(0, str(file.parent))
        world = load(package, Path(name).stem if name.endswith(".py") else name, kwargs)
        for number in (signal.SIGINT, signal.SIGTERM):  # theirs would delay the end of the process
            signal.signal(number, signal.SIG_DFL)
        if not isinstance(world, package.MultiTurnEnv):
            raise ValueError(f"it is a {type(world).__name__}; it must be a MultiTurnEnv")
        if world.rubric.has_group_rewards:
            raise ValueError(
                "its rubric scores a group of rollouts together; each trajectory is scored by "
                "itself here, so its reward functions must take one state"
            )
        _loaded.clear()
        _loaded[key] = world
    return _loaded[key]


def load(package: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return package.load_environment(name, **kwargs)
    except RuntimeError as error:  # how the package wraps what goes wrong in `load_environment`
        if isinstance(error.__cause__, TypeError | ValueError | AttributeError):
            raise ValueError(str(error)) from error
        raise


def check_version(version: str) -> None:
    parts = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    numbers = tuple(int(part or 0) for part in parts.groups()) if parts else ()
    if OLDEST <= numbers < TOO_NEW:
        return
    oldest, too_new = (".".join(map(str, bound)) for bound in (OLDEST, TOO_NEW))
    raise ValueError(
        f"{sys.executable} has verifiers {version}; supported are {oldest} and newer, below "
        f"{too_new}: pip install 'verifiers>={oldest},<{too_new}' there. What 0.4 runs are "
        "programs that talk to a model's address: the agent loop program_agent gives them one"
    )


def as_plain(message: Any) -> dict[str, Any]:
    """A message as a dict of what a chat template reads; parts of text are put together."""
    plain: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return plain


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    others = sorted({str(part.get("type")) for part in parts} - {"text"})
    if others:
        raise BadEnvironment(f"the environment shows parts of type {others}; only text is read")
    return "".join(part["text"] for part in parts)
