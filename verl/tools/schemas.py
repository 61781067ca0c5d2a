"""What tools look like to a model, and what they answer: OpenAI's function schemas, `ToolResponse`.

Schemas refuse fields they do not know, except where JSON Schema itself is open: the words of a
parameter (`items`, `minimum`, `default`) are kept and shown to the model as they are.
"""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter of a function; further words of JSON Schema are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function; further words of JSON Schema are kept."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(
            type="object", properties={}, required=[]
        )
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as chat templates and OpenAI's API take it."""

    model_config = ConfigDict(extra="forbid")

    type: str = "function"
    function: OpenAIFunctionSchema

    def offered(self) -> dict[str, Any]:
        """The dict that a chat template is given: what was stated, and the parts it relies on."""
        function = self.function.model_dump(exclude_unset=True, exclude_none=True)
        stated = self.function.parameters.model_dump(exclude_unset=True, exclude_none=True)
        parameters = {"type": "object", "properties": {}, "required": [], **stated}
        return {
            "type": self.type,
            "function": {**function, "parameters": parameters},
        }


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a parser found it: `arguments` is text that should be JSON."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """The call and whether its arguments were no JSON object; then they are empty."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except (ValueError, RecursionError):
            arguments = None
        has_error = not isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(
            name=parsed_schema.name, arguments={} if has_error else arguments
        )
        return call, has_error


class OpenAIFunctionToolCall(BaseModel):
    """A call as it stands in a message of the assistant."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool answers: text, and lists of images and videos.

    Lone surrogates in the text, which no tokenizer and no file can hold, become U+FFFD.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for kind in ("image", "video"):
            media = values.get(kind)
            if media is not None and not isinstance(media, list):
                raise ValueError(
                    f"{kind} must be a list, but got {type(media).__name__}; for a single {kind}, "
                    f"write [{kind}]"
                )
        text = values.get("text")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"text must be str, but got {type(text).__name__}")
        return {**values, "text": None if text is None else without_surrogates(text)}

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


def without_surrogates(text: str) -> str:
    """The text with pairs of surrogates joined and lone ones replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Message(BaseModel):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str | list[dict[str, Any]] | dict[str, Any] | ToolResponse
    tool_calls: list[OpenAIFunctionToolCall] | None = None
