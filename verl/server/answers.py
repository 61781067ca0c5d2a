"""What clients get: OpenAI's answers, whole and in events.

These classes are the published schema and make the JSON; `completions` and `chat` fill them in.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
Count = Annotated[int, Field(ge=0)]


def _left_out() -> Any:
    """A field that is only there when it was asked for."""
    return Field(default=None, exclude_if=lambda value: value is None)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class ModelCard(Answer):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str
    max_model_len: Count
    """Longest prompt plus response, in tokens."""


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


# ---- completions ---------------------------------------------------------------------------------


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[Count]


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[Count] | None = _left_out()
    token_ids: list[Count] | None = _left_out()


class Completion(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = _left_out()


# ---- conversations -------------------------------------------------------------------------------


class ChatLogprob(Answer):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None
    """None for a token that is not whole characters."""

    top_logprobs: Annotated[list[None], Field(max_length=0)] = []


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = _left_out()


class ChatChoice(Answer):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[Count] | None = _left_out()


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Count] | None = _left_out()


class ToolCallDelta(ToolCall):
    index: Count


class ChatDelta(Answer):
    role: Literal["assistant"] | None = _left_out()
    content: str | None = _left_out()
    tool_calls: list[ToolCallDelta] | None = _left_out()


class ChatChunkChoice(Answer):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[Count] | None = _left_out()


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = _left_out()
    prompt_token_ids: list[Count] | None = _left_out()


# ---- the server itself ---------------------------------------------------------------------------


class Health(Answer):
    status: Literal["ok", "degraded"]
    """`degraded` while some of the engines do not answer."""

    engines: Count
    engines_alive: Count


class Alive(Answer):
    status: Literal["alive"] = "alive"
