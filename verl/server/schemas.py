"""Requests that clients may send: OpenAI's two, as far as they have a meaning here.

A field that is not listed is refused, and so is a value that would have to be ignored: a client
never gets something else than it asked for. Every number and every list has a limit. Beside
OpenAI's fields there are `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos` and
`return_token_ids`, as other servers of open models have them.

Values are those of JSON Schema, where 5.0 is a whole number and 0 is not false. Pydantic parses the
bytes of a body (no NaN, no halves of characters, no endless nesting); lists, values and keys are
counted before, because a million of them are slow to refuse.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from verl.server.errors import ApiError, invalid


@dataclass(frozen=True)
class Whole:
    """`Annotated[int, Whole(low, high)]`: a whole number, however it is written."""

    low: int
    high: int
    title: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        exact = core_schema.int_schema(ge=self.low, le=self.high, strict=True)
        number = core_schema.float_schema(
            ge=self.low, le=self.high, strict=True, allow_inf_nan=False
        )
        written = core_schema.no_info_after_validator_function(_as_int, number)
        return core_schema.union_schema([(exact, "as integer"), (written, "as number")])

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        named = {} if self.title is None else {"title": self.title}
        return {"type": "integer", "minimum": self.low, "maximum": self.high, **named}


@dataclass(frozen=True)
class Only:
    """`Annotated[bool, Only(False)]`: a switch that has one position."""

    value: bool

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._check, core_schema.bool_schema(strict=True)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "boolean", "const": self.value}

    def _check(self, value: bool) -> bool:
        if value is not self.value:
            raise ValueError(f"it can only be {str(self.value).lower()}")
        return value


def _as_int(value: float) -> int:
    if not value.is_integer():
        raise ValueError("it must be a whole number")
    return int(value)


MAX_TOKEN_ID = (1 << 31) - 1
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 1 << 20
MAX_SAMPLES = 128
MAX_NEW_TOKENS = 1 << 20
MAX_MESSAGES = 1024
MAX_PARTS = 64
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_SEED = (1 << 53) - 1  # larger ones are not exact in every JSON
COLDEST = 0.01
HOTTEST = 2.0
TOKEN_ID = "TokenId"
MODEL_NAME = "ModelName"
"""Titles in the schema, where the server adds the size of its vocabulary and its model's name."""


class Strict(BaseModel):
    """Base of request bodies: no value is converted, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _cold_enough(value: float) -> float:
    if value != 0 and not COLDEST <= value <= HOTTEST:
        raise ValueError(f"it must be 0, or from {COLDEST} to {HOTTEST:g}")
    return value


def _kind_of_prompt(value: Any) -> str:
    """Which of the four forms a prompt has; decided by its first element, to give one error."""
    if not isinstance(value, list):
        return "as text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "as lists of ids"
    return "as ids" if isinstance(first, int | float) else "as texts"


def _kind_of_text(value: Any) -> str:
    return "as parts" if isinstance(value, list) else "as text"


def _number_schema(*choices: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", **choice} for choice in choices]})


# Below the coldest temperature logits overflow; 0 is exact.
Temperature = Annotated[
    float,
    AfterValidator(_cold_enough),
    _number_schema({"minimum": 0, "maximum": 0}, {"minimum": COLDEST, "maximum": HOTTEST}),
]
TokenId = Annotated[int, Whole(0, MAX_TOKEN_ID, TOKEN_ID)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPT_TOKENS)]
ManyTexts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
ManyIds = Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Prompt = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[ManyTexts, Tag("as texts")]
    | Annotated[Ids, Tag("as ids")]
    | Annotated[ManyIds, Tag("as lists of ids")],
    Discriminator(_kind_of_prompt),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
Stop = Annotated[
    Annotated[StopText, Tag("as text")] | Annotated[StopTexts, Tag("as parts")],
    Discriminator(_kind_of_text),
]
NewTokens = Annotated[int, Whole(1, MAX_NEW_TOKENS)]
Label = Annotated[str, Field(min_length=1, max_length=256)]
Nothing = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(Strict):
    include_usage: bool = False
    """Send the numbers of tokens in a last event."""


class SamplingRequest(Strict):
    """What both requests share."""

    model: Annotated[str, Field(min_length=1, max_length=1024, title=MODEL_NAME)]
    n: Annotated[int, Whole(1, MAX_SAMPLES)] = 1
    max_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Whole(-1, MAX_TOKEN_ID)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    seed: Annotated[int, Whole(0, MAX_SEED)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOPS)] | None = (
        None
    )
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Add the token ids of prompt and response: text cannot always be turned back into them."""

    prompt_cache_key: Label | None = None
    """Requests with the same key go to the same engine, which may know their beginning."""

    user: Annotated[str, Field(max_length=256)] | None = None
    """Accepted; has no effect."""

    frequency_penalty: Nothing | None = None
    presence_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def reports_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    """Continue prompts."""

    prompt: Prompt
    logprobs: Annotated[int, Whole(0, 0)] | None = None
    """0 adds the log-probability of each drawn token."""

    echo: Annotated[bool, Only(False)] | None = None
    suffix: None = None
    best_of: Annotated[int, Whole(1, 1)] | None = None


# ---- conversations -------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    """`data:image/...;base64,...`, or `file://...` below a folder that the server allows."""

    detail: Literal["auto", "low", "high"] | None = None
    """Accepted; the model's processor decides."""


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


SeenPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
SeenParts = Annotated[list[SeenPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
Parts = Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
Content = Annotated[
    Annotated[str, Tag("as text")] | Annotated[Parts, Tag("as parts")],
    Discriminator(_kind_of_text),
]


class MadeFunctionCall(Strict):
    name: Label
    arguments: str


class MadeCall(Strict):
    id: Label
    type: Literal["function"]
    function: MadeFunctionCall


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: Label | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("as text")] | Annotated[SeenParts, Tag("as parts")],
        Discriminator(_kind_of_text),
    ]
    name: Label | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: Label | None = None
    tool_calls: (
        Annotated[list[MadeCall], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)] | None
    ) = None
    refusal: None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: Label


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionTool(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """Answer a conversation."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    """Add the log-probability of each drawn token."""

    top_logprobs: Annotated[int, Whole(0, 0)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Annotated[bool, Only(True)] | None = None
    response_format: TextFormat | None = None
    store: Annotated[bool, Only(False)] | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else list(self.tools or ())


MAX_CONTAINERS = 1 << 16
MAX_VALUES = 1 << 18
MAX_KEYS = 1 << 10
"""Most lists and objects of a body, most values of all of them, and most keys of one object."""

SMALL_BODY_BYTES = 1 << 14
"""Too small to hold much: neither counted nor parsed beside the event loop."""

Form = TypeVar("Form", bound=SamplingRequest)


def parsed(form: type[Form], body: bytes, *, max_values: int = MAX_VALUES) -> Form:
    check_size(body, max_values)
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None


def check_size(text: bytes, max_values: int) -> int:
    """Refuse a JSON text that would take long to parse; its number of values, or a bit more.

    Every unknown key costs an error, and every value memory, before a schema can object to one.
    """
    is_small = len(text) <= SMALL_BODY_BYTES
    if not is_small:
        text = outside_texts(text, max_texts=2 * max_values)
    num_containers, num_keys = text.count(b"[") + text.count(b"{"), text.count(b":")
    num_values = max(text.count(b",") + num_containers, num_keys)
    if num_containers > MAX_CONTAINERS:
        raise too_many(f"{num_containers} lists and objects; it may have {MAX_CONTAINERS}")
    if num_values > max_values:
        raise too_many(f"{num_values} values; it may have {max_values}")
    if not is_small and num_keys > MAX_KEYS and (most := most_keys(text)) > MAX_KEYS:
        raise too_many(f"an object with {most} keys; it may have {MAX_KEYS}")
    return num_values


def too_many(what: str) -> ApiError:
    return ApiError(400, f"the body has {what}", code="too_many_parts")


def outside_texts(text: bytes, max_texts: int) -> bytes:
    """The punctuation of a JSON text: nothing of what stands between quotes, no numbers."""
    # With escaped quotes out of the way, every second piece between quotes is inside a text.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (num_texts := bare.count(b'"') // 2) > max_texts:
        raise too_many(f"{num_texts} texts; it may have {max_texts}")
    return b"".join(bare.split(b'"')[::2]).translate(None, delete=NO_PUNCTUATION)


NO_PUNCTUATION = bytes(set(range(256)) - set(b"[]{}:,"))


def most_keys(punctuation: bytes) -> int:
    """Keys of the object that has the most, doubles included."""
    most, counts = 0, [0]
    for letter in punctuation.replace(b",", b"").replace(b"[", b"{").replace(b"]", b"}"):
        if letter == COLON:
            counts[-1] += 1
        elif letter == OPENING:
            counts.append(0)
        else:
            most = max(most, counts.pop())
            counts = counts or [0]
    return max(most, *counts)


COLON, OPENING = b":{"
