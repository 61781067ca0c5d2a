"""`SandboxFusionTool`: a code interpreter. The model sends a program and reads what it printed.

Programs run in our own sandbox (docs/sandbox.md), or in a Sandbox Fusion service where
`sandbox_fusion_url` is set. A program that fails, prints too much or runs out of time is the
model's doing, and it reads so; a sandbox that fails is `InfraFault`.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.protocol.trajectory import InfraFault
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score.code_tests import extract_code
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api
from verl.utils.sandbox import Limits, Sandbox, SandboxError

MAX_STREAM_CHARACTERS = 64 * 1024
QUEUE_SECONDS = 600.0
OVERHEAD_SECONDS = 60.0
DEFAULT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs a Python program and returns what it printed.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The program; print what you need."}
            },
            "required": ["code"],
        },
    },
}
_NO_OUTPUT = "The program printed nothing."

_places: dict[int, threading.BoundedSemaphore] = {}
_places_lock = threading.Lock()


class SandboxFusionTool(BaseTool):
    """Configuration:

    `sandbox_fusion_url` a Sandbox Fusion service; without it programs run in our own sandbox
    `num_workers`, `rate_limit` (10) the smaller of both is the number of programs at once
    `enable_global_rate_limit` (true) tools of this process share the `rate_limit` places
    `default_timeout` (30) seconds for a program; the argument `timeout` of a call may shorten it
    `default_language` (python) languages other than Python need a service
    `memory_limit_mb` (1024)
    """

    allows_parallel_calls = True
    default_schema = DEFAULT_SCHEMA
    options = (
        *("sandbox_fusion_url", "num_workers", "rate_limit", "enable_global_rate_limit"),
        *("default_timeout", "default_language", "memory_limit_mb"),
    )

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.url: str = config.get("sandbox_fusion_url") or ""
        self.timeout_seconds = float(config.get("default_timeout", 30))
        self.language = str(config.get("default_language", "python"))
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        rate_limit = int(config.get("rate_limit", 10))
        workers = min(int(config.get("num_workers", 10)), rate_limit)
        if workers < 1 or not self.timeout_seconds > 0:
            raise ValueError(
                f"num_workers, rate_limit and default_timeout of SandboxFusionTool are "
                f"{config.get('num_workers', 10)}, {rate_limit} and {self.timeout_seconds}; they "
                "must be positive"
            )
        if not self.url and self.language != "python":
            raise ValueError(
                f"default_language of SandboxFusionTool is {self.language!r}, and our own sandbox "
                "runs Python only; set sandbox_fusion_url to a Sandbox Fusion service"
            )
        # The sandbox ends programs by itself; this deadline is beyond all that it may take.
        self.config["timeout"] = QUEUE_SECONDS + 3 * self.timeout_seconds + OVERHEAD_SECONDS
        self.rate_limit = rate_limit
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="code interpreter")
        self._place = threading.BoundedSemaphore(rate_limit)
        if config.get("enable_global_rate_limit", True):
            with _places_lock:
                self._place = _places.setdefault(rate_limit, self._place)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ValueError("'code' must be the text of a program")
        is_fenced = code.lstrip().startswith("```")
        program = (extract_code(code) if is_fenced else None) or code
        seconds = self._seconds(parameters.get("timeout"))
        language = str(parameters.get("language") or self.language)
        if not self.url and language != "python":
            raise ValueError(f"programs in {language[:40]!r} cannot be run, only Python")
        loop = asyncio.get_running_loop()
        text, status = await loop.run_in_executor(
            self._threads, self._run, program, seconds, language, time.monotonic()
        )
        return ToolResponse(text=text), 0.0, {"status": status}

    def _seconds(self, asked: Any) -> float:
        """A call may ask for less time than there is, never for more."""
        is_number = isinstance(asked, int | float) and not isinstance(asked, bool)
        return (
            min(float(asked), self.timeout_seconds)
            if is_number and asked > 0
            else (self.timeout_seconds)
        )

    def _run(self, program: str, seconds: float, language: str, asked_at: float) -> tuple[str, str]:
        with self._place:
            waited = time.monotonic() - asked_at
            if waited > QUEUE_SECONDS:
                raise InfraFault(
                    f"a program waited {waited:.0f} s for one of the {self.rate_limit} places of "
                    "the code interpreter; raise its num_workers and rate_limit"
                )
            if self.url:
                return self._run_remotely(program, seconds, language)
            return self._run_here(program, seconds)

    def _run_here(self, program: str, seconds: float) -> tuple[str, str]:
        limits = Limits(timeout_seconds=seconds, memory_mb=self.memory_limit_mb)
        try:
            result = Sandbox(limits).run(program)
        except SandboxError as error:
            raise InfraFault(f"the code interpreter's sandbox failed: {error}") from error
        out = result.stdout.decode(errors="replace")
        err = result.stderr.decode(errors="replace")
        endings = {
            "timeout": f"The program was stopped after {seconds:g} s.",
            "memory_limit": f"The program was stopped: it used over {self.memory_limit_mb} MB.",
            "output_limit": f"The program was stopped: it printed over {limits.output_bytes} B.",
        }
        return _reply(out, err, endings.get(result.status, "")), result.status

    def _run_remotely(self, program: str, seconds: float, language: str) -> tuple[str, str]:
        answer, error = call_sandbox_api(
            self.url, program, "", seconds, seconds, self.memory_limit_mb, language
        )
        if answer is None:
            raise InfraFault(f"Sandbox Fusion at {self.url} did not run a program: {error}")
        status = answer.get("status")
        compiled, run = (
            part if isinstance(part, Mapping) else {}
            for part in (answer.get("compile_result"), answer.get("run_result"))
        )
        is_late = "TimeLimitExceeded" in (compiled.get("status"), run.get("status"))
        if status not in ("Success", "Failed"):
            raise InfraFault(
                f"Sandbox Fusion at {self.url} failed with status {status!r}: "
                f"{str(answer.get('message'))[:200]}"
            )
        out, err = str(run.get("stdout") or ""), str(run.get("stderr") or "")
        err = str(compiled.get("stderr") or "") + err
        ending = f"The program was stopped after {seconds:g} s." if is_late else ""
        kind = "timeout" if is_late else "finished" if status == "Success" else "failed"
        return _reply(out, err, ending), kind


def _reply(out: str, err: str, ending: str) -> str:
    """What was printed, then the errors, then why it was stopped."""
    streams = out[:MAX_STREAM_CHARACTERS], err[:MAX_STREAM_CHARACTERS]
    parts = [part.rstrip("\n") for part in (*streams, ending) if part.strip()]
    return "\n".join(parts) or _NO_OUTPUT
