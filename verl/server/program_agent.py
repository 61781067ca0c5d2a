"""`program_agent`: an agent program per sample, which talks to the policy over HTTP.

The program is a command, or a Python function in a file, that knows OpenAI's or Anthropic's API. It
is started with the row on its standard input and the gateway's address in its environment. What the
engine sampled for its calls is the trajectory; several rows where the calls were not one
conversation. The program may write a reward, or the reward function grades the last row.
"""

import asyncio
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.protocol.trajectory import InfraFault
from verl.server.gateway import Gateway, gateway_session
from verl.server.programs import REWARD_FILE, ProgramEnd, ProgramSpec, argv, run_program
from verl.server.tree import Budget, fork_counts

FUNCTION_RUNNER = Path(__file__).with_name("program_function.py")
SHOWN_CHARACTERS = 500


class ProgramAgentLoop(AgentLoopBase):
    """Runs a program until it ends, and returns what it made the policy say.

    Arguments come from the entry of the YAML file at `rollout.agent.agent_loop_config_path`:
    `command` (a list, or a text that is split without a shell) or `function` (`file.py:name`),
    `timeout` in seconds, `env` (variables to set), `cwd`, `max_calls` of one program,
    `max_programs` that run at once, and `on_failure`: whether a program that fails or is late is
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
        )
        self.on_failure = on_failure
        self.max_calls = max_calls
        self.max_programs = max_programs

    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        make, manager = self.make_gateway, self.server_manager
        async with (
            slots(self.loop, self.max_programs),
            gateway_session(make, manager, sampling_params, max_calls=self.max_calls) as session,
        ):
            end = await run_program(self.spec, kwargs, session.environment())
        self.check(end, session.fault, num_calls=session.num_calls)
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
        spent = sum(output.metrics.generate_sequences for output in outputs)
        last.metrics.tool_calls = max(0.0, end.seconds - spent)
        return last if len(outputs) == 1 else outputs

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
