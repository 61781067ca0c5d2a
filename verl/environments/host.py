"""What runs in an environment's process: one world at a time, called over a line.

A call is a JSON object: `reset` makes a world and begins its episode, `step` acts in it, `close`
ends it and tells whether anything is left of it. The reply has an observation, a refusal of the
name or arguments (`"kind": "bad"`), or an error of the world (`"kind": "broken"`). A fork that a
world makes never replies.

Only the standard library is imported, so that any interpreter can be a host.
"""

import asyncio
import base64
import inspect
import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from verl.environments.base import (
    Action,
    BadEnvironment,
    InvalidAction,
    Observation,
    ToolCall,
    checked,
    defines,
    make_environment,
)
from verl.utils.line import Line
from verl.utils.processes import die_with_parent, forks_end_here

MAX_CALL_BYTES = 64 << 20
MAX_REPLY_BYTES = 64 << 20
MAX_TRACE_CHARACTERS = 4000


def work(connection: socket.socket) -> None:
    """Serve calls until the pool closes the line; they are numbered upwards, or it is broken."""
    os.setsid()  # what is sent to the trainer's terminal is not for it
    die_with_parent()
    line = Line(connection, max_bytes=MAX_CALL_BYTES)
    host = Host()
    last = -1
    while (call := line.receive()) is not None and call.number > last:
        last = call.number
        reply = host.reply_to(json.loads(call.body))
        sys.stdout.flush()
        line.send(call.number, reply)


class Host:
    """The world of the lease that has this process now."""

    def __init__(self) -> None:
        self._world: Any = None
        self._loop = asyncio.new_event_loop()

    def reply_to(self, call: dict[str, Any]) -> bytes:
        try:
            with forks_end_here():
                reply = self._answer(call)
                body = json.dumps(reply).encode()
            if len(body) > MAX_REPLY_BYTES:
                raise ValueError(
                    f"the observation has {len(body)} bytes; the limit is {MAX_REPLY_BYTES}"
                )
            return body
        except BadEnvironment as error:
            return json.dumps({"error": str(error), "kind": "bad"}).encode()
        except BaseException as error:  # whatever a world does, the trainer is told
            text = f"{type(error).__name__}: {error}"[:MAX_TRACE_CHARACTERS]
            trace = traceback.format_exc()[-MAX_TRACE_CHARACTERS:]
            return json.dumps({"error": text, "trace": trace, "kind": "broken"}).encode()

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["call"] == "close":
            self._close()
            return {"is_clean": not left_behind()}
        if call["call"] == "reset":
            self._close()
            seed_everything(call["seed"])
            self._world = make_environment(call["name"], call["kwargs"])
            seed_everything(call["seed"])  # the episode does not depend on what making it drew
            observation = checked(self._run(self._world.reset(call["row"], call["seed"])))
            tools = list(self._world.tools) if defines(self._world, "tools") else []
            return {"observation": as_message(observation), "tools": tools}
        calls = [ToolCall(**one) for one in call["tool_calls"]]
        try:
            observation = checked(self._run(self._world.step(Action(call["text"], calls))))
        except InvalidAction as refusal:
            observation = Observation(text=str(refusal), reward=0.0, info={"is_refused": True})
        return {"observation": as_message(observation)}

    def _close(self) -> None:
        world, self._world = self._world, None
        if world is not None and defines(world, "close"):
            self._run(world.close())

    def _run(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._loop.run_until_complete(result)
        return result


def left_behind() -> list[str]:
    """Processes that worlds have started here and not ended, daemons included: the keeper of this
    process has adopted those."""
    keeper = os.getppid()
    pids: list[str] = []
    for parent in (keeper, os.getpid()):
        listed = Path(f"/proc/{parent}/task/{parent}/children")
        if listed.exists():  # a kernel without it: they end with this process
            pids += listed.read_text().split()
    return [pid for pid in pids if int(pid) != os.getpid()]


def seed_everything(seed: int) -> None:
    """The generators that worlds draw from without asking for a seed of their own."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def as_message(observation: Observation) -> dict[str, Any]:
    return {
        **vars(observation),
        "images": [base64.b64encode(image).decode("ascii") for image in observation.images],
    }


def from_message(message: dict[str, Any]) -> Observation:
    """The observation of `as_message`, checked again: it comes from another process."""
    images = [base64.b64decode(image, validate=True) for image in message["images"]]
    return checked(Observation(**{**message, "images": images}))
