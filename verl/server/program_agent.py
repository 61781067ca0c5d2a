"""`program_agent`: an agent program per sample, which talks to the policy over HTTP.

The program is a command, or a Python function in a file, that knows OpenAI's or Anthropic's API. It
is started with the row on its standard input and the gateway's address in its environment. What the
engine sampled for its calls is the trajectory; several rows where the calls were not one
conversation. The program may write a reward, or the reward function grades the last row.
"""

import asyncio
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.journal import JournalMismatch, current_journal, journalled
from verl.protocol.trajectory import InfraFault
from verl.server.errors import ApiError
from verl.server.gateway import Gateway, gateway_session
from verl.server.jailed import Jail
from verl.server.programs import REWARD_FILE, ProgramEnd, ProgramSpec, argv, plain, run_program
from verl.server.session import Session
from verl.server.tree import Budget, fork_counts
from verl.utils.sandbox import SandboxError, SandboxUnavailable

logger = logging.getLogger(__name__)

FUNCTION_RUNNER = Path(__file__).with_name("program_function.py")
SHOWN_CHARACTERS = 500


class ProgramAgentLoop(AgentLoopBase):
    """Runs a program until it ends, and returns what it made the policy say.

    Arguments come from the entry of the YAML file at `rollout.agent.agent_loop_config_path`:
    `command` (a list, or a text that is split without a shell) or `function` (`file.py:name`),
    `timeout` in seconds, `env` (variables to set), `cwd`, `max_calls` of one program,
    `max_programs` that run at once, `sandbox` (`true`, or `files`, `memory_mb`, `max_processes`:
    no network but the gateway), and `on_failure`: whether a program that fails or is late is
    graded as it is (`grade`) or left out of the training (`infra`).
    """

    def __init__(
        self,
        *args: Any,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        timeout: float = 600.0,
        env: Mapping[str, Any] | None = None,
        cwd: str | None = None,
        max_calls: int = 1000,
        max_programs: int = 64,
        max_output_bytes: int = 16 << 10,
        on_failure: Literal["grade", "infra"] = "grade",
        sandbox: bool | Mapping[str, Any] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if (command is None) == (function is None):
            raise ValueError(
                "program_agent needs a command or a function, one of the two, in its entry of "
                f"agent_loop_config_path; command is {command!r} and function is {function!r}"
            )
        if on_failure not in ("grade", "infra"):
            raise ValueError(f"on_failure is {on_failure!r}; it must be grade or infra")
        self.spec = ProgramSpec(
            command=argv(command) if command is not None else function_command(str(function)),
            timeout_seconds=timeout,
            environment={name: str(value) for name, value in (env or {}).items()},
            cwd=cwd,
            max_output_bytes=max_output_bytes,
            jail=Jail.of_entry(sandbox),
        )
        if self.spec.jail is not None and cwd is not None:
            raise ValueError(
                f"program_agent has cwd {cwd!r} and a sandbox, in which programs begin in a folder "
                "of their own; name the folder in sandbox.files instead"
            )
        self.on_failure = on_failure
        self.max_calls = max_calls
        self.max_programs = max_programs

    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        request = {"command": list(self.spec.command), "row": plain(kwargs)}
        async with slots(self.loop, self.max_programs), self.session(sampling_params) as session:
            ask = functools.partial(self.run_program, session, kwargs)
            record = await journalled("program", request, ask)
            difference = None
            if record["calls"] and not session.calls:  # it comes from the journal
                difference = await self.make_again(session, record)
        if difference is not None:
            logger.warning("%s; the program is run again", difference)
            async with (
                slots(self.loop, self.max_programs),
                self.session(sampling_params) as session,
            ):
                record = await self.run_program(session, kwargs)
        end = ProgramEnd(**record["end"], seconds=record["seconds"])
        self.check(end, record["fault"], num_calls=len(record["calls"]))
        outputs = session.tree.outputs()
        fields = {
            "program_outcome": end.outcome,
            "program_exit_code": end.exit_code,
            "program_stdout": end.stdout,
            "program_stderr": end.stderr,
            "program_forks": fork_counts(session.tree.forks),
            "fork_reasons": dict(session.tree.forks),
        }
        for output in outputs:
            output.extra_fields |= fields
        last = outputs[-1]
        last.reward_score = end.reward
        if end.reward_extras:
            last.extra_fields["reward_extra_info"] = end.reward_extras
        spent = sum(output.metrics.generate_sequences for output in outputs)
        last.metrics.tool_calls = max(0.0, end.seconds - spent)
        return last if len(outputs) == 1 else outputs

    async def run_program(self, session: Session, row: Mapping[str, Any]) -> dict[str, Any]:
        """Run the program; how it ended and what it asked, as plain data for the journal."""
        try:
            end = await run_program(self.spec, row, session.environment())
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise InfraFault(str(error), reason="program") from error
        told = asdict(end)
        seconds = told.pop("seconds")
        await session.close()  # a call that is still under way is no part of the record
        return {"end": told, "seconds": seconds, "fault": session.fault, **session.recorded()}

    async def make_again(self, session: Session, record: Mapping[str, Any]) -> str | None:
        """The session as the journal has it, without the program; why it cannot be, or None."""
        try:
            difference = await session.ask_again(record)
        except ApiError as error:
            difference = f"a call that was answered is now refused: {error.message}"
        if difference is None:
            return None
        journal = current_journal.get(None)
        message = f"a program cannot be made again from the journal: {difference}"
        if journal is not None and journal.journal.mode != "resume":
            raise JournalMismatch(message)
        return message

    def session(self, sampling_params: dict[str, Any]) -> AbstractAsyncContextManager[Session]:
        make, manager = self.make_gateway, self.server_manager
        return gateway_session(make, manager, sampling_params, max_calls=self.max_calls)

    def make_gateway(self) -> Gateway:
        rollout = self.config.actor_rollout_ref.rollout
        return Gateway(
            self.server_manager,
            self.tokenizer,
            Budget(prompt_length=rollout.prompt_length, response_length=rollout.response_length),
            template_kwargs=self.apply_chat_template_kwargs,
            call_format=rollout.multi_turn.format,
        )

    def check(self, end: ProgramEnd, fault: str | None, *, num_calls: int) -> None:
        """Raise where the policy cannot have caused how the program ended."""
        program = f"the program {' '.join(self.spec.command)[:SHOWN_CHARACTERS]}"
        told = f"outcome {end.outcome}, exit code {end.exit_code}"
        if end.stderr.strip():
            told += f", stderr {end.stderr.strip()[-SHOWN_CHARACTERS:]!r}"
        if fault is not None:
            raise InfraFault(f"the gateway failed {program}: {fault}", reason="gateway")
        if not num_calls:
            message = f"{program} ended without an answer from the policy ({told})"
            raise InfraFault(message, reason="program")
        if end.outcome != "finished" and self.on_failure == "infra":
            raise InfraFault(f"{program} did not finish ({told})", reason="program")


def function_command(function: str) -> tuple[str, ...]:
    file, colon, name = function.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).expanduser().is_file():
        raise ValueError(f"the function {function!r} of program_agent must be file.py:name")
    path = str(Path(file).expanduser().resolve())
    return sys.executable, str(FUNCTION_RUNNER), path, name, REWARD_FILE


@functools.lru_cache(maxsize=8)
def slots(loop: asyncio.AbstractEventLoop, max_programs: int) -> asyncio.Semaphore:
    """Admission of programs on one event loop."""
    del loop
    return asyncio.Semaphore(max_programs)
