"""Every way in which a request can fail, as clients see it.

An answer is OpenAI's error object: a message for people, a type and a code for programs. Messages
are written here or in the code that refuses; nothing of an exception from elsewhere (a path, an
address, a stack trace) gets into one.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

MAX_NAMED_FAULTS = 3
MAX_NAME_CHARACTERS = 64

REASONS = {
    "top_logprobs": "only the drawn token's log-probability is known (logprobs=true gives it)",
    "logprobs": "for completions 0 gives the drawn tokens' log-probabilities; others are unknown",
    "chat_template": "the server's own template is used",
    "chat_template_kwargs": "the server's own template is used as it is",
    "frequency_penalty": "use repetition_penalty",
    "presence_penalty": "use repetition_penalty",
    "tool_choice": "a model cannot be forced to call a tool; auto and none are possible",
    "response_format": "answers are free text",
    "echo": "the prompt is not repeated; return_token_ids gives its tokens",
}
"""Why a field is not taken, where the rule alone would leave a client guessing."""


class ErrorBody(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Any answer whose status is 400 or more, and the last event of a stream that failed."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorBody


class ApiError(Exception):
    """A request that is answered with an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def busy(message: str, retry_seconds: int = 1) -> ApiError:
    """Too much at once: the same request may be sent again a little later."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str, retry_seconds: int = 5) -> ApiError:
    """No engine can answer now."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def internal_error() -> ApiError:
    return ApiError(500, "the server failed; its log says why", kind="server_error", code="failed")


def too_slow(seconds: float) -> ApiError:
    message = f"the answer took longer than {seconds:g} seconds; ask for fewer tokens"
    return ApiError(504, message, kind="server_error", code="timeout")


def invalid(error: ValidationError) -> ApiError:
    """What pydantic found, in a few words that repeat nothing of what the client sent but names."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    texts = list(dict.fromkeys(_fault_text(fault) for fault in faults[:MAX_NAMED_FAULTS]))
    if len(faults) > MAX_NAMED_FAULTS:
        texts.append(f"and {len(faults) - MAX_NAMED_FAULTS} more")
    param = _field(faults[0]) or None
    return ApiError(400, "; ".join(texts), param=param, code="invalid_value")


def _fault_text(fault: ErrorDetails) -> str:
    if fault["type"] == "json_invalid":
        return "the body is not valid JSON, or nested too deeply"
    field = _field(fault)
    text = f"{field}: {fault['msg']}" if field else fault["msg"]
    return f"{text} ({REASONS[field]})" if field in REASONS else text


def _field(fault: ErrorDetails) -> str:
    """The field, without the names of the alternatives that pydantic tried."""
    parts = [str(part) for part in fault["loc"] if not str(part).startswith("as ")]
    return ".".join(_printable(part) for part in parts)


def _printable(text: str) -> str:
    kept = "".join(letter if letter.isprintable() else "?" for letter in text)
    return kept[:MAX_NAME_CHARACTERS]
