"""From what a client wrote to token ids, and back to the text of single tokens.

Tokenizing a long text takes seconds, and a tokenizer must not be asked by two threads at once: so
one thread does it, with a tokenizer of its own, while the event loop decodes with the other.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from verl.server.errors import ApiError
from verl.server.schemas import (
    MAX_VALUES,
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    ImagePart,
    MadeCall,
    Message,
    TextPart,
    Tool,
    ToolMessage,
    check_size,
)
from verl.utils.dataset.continuation import Continuation
from verl.utils.dataset.media import MediaEncoder
from verl.utils.dataset.prompts import Prompt, PromptTooLong, encode_prompt, media_parts
from verl.utils.dataset.tables import DataError
from verl.utils.images import BadImage
from verl.utils.media import Media

MAX_CONTINUATIONS = 64
"""Sets of tools whose continuations are remembered."""


class Encoder:
    """Prompts of requests as token ids; `vocabulary` is the number of ids the model knows."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        vocabulary: int,
        template_kwargs: Mapping[str, Any] | None = None,
        images: "ClientImages | None" = None,
    ) -> None:
        """Without `images` the model is given none."""
        self._images = images
        self._tokenizer = tokenizer
        self._own = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary
        self._template_kwargs = template_kwargs
        self._continuations: dict[str, Continuation] = {}

    @property
    def reads_images(self) -> bool:
        return self._images is not None

    async def prompts(self, request: CompletionRequest) -> list[list[int]]:
        """The ids of each prompt of a request for completions."""
        given = request.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        return [await self._ids(prompt, f"prompt.{n}") for n, prompt in enumerate(given)]

    async def conversation(self, request: ChatRequest) -> list[int]:
        """The ids of a conversation without images as the chat template writes it."""
        if has_images(request.messages):
            message = "images are not taken here; this session has text only"
            raise ApiError(400, message, param="messages", code="images_refused")
        return (await self.conversation_with_images(request))[0]

    async def conversation_with_images(
        self, request: ChatRequest
    ) -> tuple[list[int], tuple[Media, ...]]:
        """The ids of a conversation as the chat template writes it, and its images."""
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400, "the model has no chat template; use /v1/completions", code="no_chat"
            )

        def build() -> tuple[Prompt, list[dict[str, Any]]]:
            check_arguments(request.messages)
            return template_messages(request.messages), [
                template_tool(tool) for tool in request.offered_tools
            ]

        if not has_images(request.messages):
            return self._fitting(await self._encode(build, "messages"), "messages"), ()
        if self._images is None:
            message = "the model does not see; send text only"
            raise ApiError(400, message, param="messages", code="images_refused")
        encode = partial(self._images.encode, build, self.max_model_len, self._template_kwargs)
        try:
            ids, media = await asyncio.get_running_loop().run_in_executor(self._thread, encode)
        except PromptTooLong as error:
            raise self._too_long("messages") from error
        except (BadImage, DataError) as error:
            raise ApiError(400, str(error), param="messages", code="invalid_image") from error
        return self._fitting(ids, "messages"), media

    async def after_turn(
        self,
        turn_ids: Sequence[int],
        messages: Sequence[Message],
        num_known: int,
        tools: Sequence[Tool],
    ) -> list[int]:
        """The ids that follow a turn of the model, so that it speaks next after `messages`, of
        which the first `num_known` end with that turn.

        `CannotContinue` where the template does not say which.
        """

        def append() -> list[int]:
            check_arguments(messages)
            offered = [template_tool(tool) for tool in tools]
            key = json.dumps(offered, sort_keys=True)
            continuation = self._continuations.get(key)
            if continuation is None:
                if len(self._continuations) >= MAX_CONTINUATIONS:
                    self._continuations.clear()
                continuation = Continuation(
                    self._own, template_kwargs=self._template_kwargs, tools=offered or None
                )
                self._continuations[key] = continuation
            new = template_messages(messages)[num_known:]
            return continuation.ids_after_turn(list(turn_ids), new)

        return await asyncio.get_running_loop().run_in_executor(self._thread, append)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        if max(token_ids, default=0) >= self.vocabulary:
            message = f"{param}: token ids must be below {self.vocabulary}"
            raise ApiError(400, message, param=param, code="invalid_value")

    def decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def token_text(self, token_id: int) -> str:
        """One token by itself, control tokens included."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ids(self, prompt: Any, param: str) -> list[int]:
        if isinstance(prompt, str):
            return self._fitting(await self._encode(lambda: (prompt, []), param), param)
        self.check_ids(prompt, param)
        return self._fitting(list(prompt), param)

    async def _encode(
        self, build: Callable[[], tuple[Prompt, list[dict[str, Any]]]], param: str
    ) -> list[int]:
        def encode() -> list[int]:
            prompt, tools = build()
            return encode_prompt(
                prompt,
                self._own,
                max_tokens=self.max_model_len,
                tools=tools,
                template_kwargs=self._template_kwargs,
            )

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, encode)
        except PromptTooLong as error:
            raise self._too_long(param) from error
        except (TemplateError, TypeError, DataError) as error:
            # Templates raise these for what they do not take; their texts are the model author's.
            message = "the model's chat template does not take these messages"
            raise ApiError(400, message, param=param, code="template_refused") from error

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError(400, f"{param} has no tokens", param=param, code="empty_prompt")
        if len(ids) >= self.max_model_len:
            raise self._too_long(param)
        return ids

    def _too_long(self, param: str) -> ApiError:
        return ApiError(
            400,
            f"{param} is too long: prompt and response have room for {self.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )


class ClientImages:
    """Images that clients send: in `data:` URLs, or files below the folder `root`."""

    def __init__(self, media: MediaEncoder, root: str | None = None) -> None:
        self._media = media
        self._root = None if root is None else Path(root).expanduser().resolve()

    def encode(
        self,
        build: Callable[[], tuple[Prompt, list[dict[str, Any]]]],
        max_tokens: int,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[int], tuple[Media, ...]]:
        prompt, tools = build()
        assert not isinstance(prompt, str)
        for part in media_parts(prompt):
            assert isinstance(part, dict), "`template_messages` has made it"
            part["image"] = self._checked(part["image"])
        return self._media.encode_prompt(
            prompt, max_tokens=max_tokens, tools=tools, template_kwargs=template_kwargs
        )

    def _checked(self, url: str) -> str:
        """The URL, or the path that was checked: what is opened must not be resolved otherwise."""
        if url.startswith("data:"):
            return url
        if self._root is None or not url.startswith("file://"):
            raise BadImage("an image is a data: URL, or a file below the folder the server allows")
        path = Path(url.removeprefix("file://")).resolve()
        if not path.is_relative_to(self._root):
            raise BadImage("the file of an image is not below the folder that the server allows")
        return str(path)


def has_images(messages: Sequence[Message]) -> bool:
    return any(
        isinstance(part, ImagePart)
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


# ---- messages as chat templates expect them ------------------------------------------------------


def template_message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message.content)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return plain


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation; replies of tools name the call that they answer, as some templates write."""
    names: dict[str, str] = {}
    written: list[dict[str, Any]] = []
    for message in messages:
        plain = template_message(message)
        if isinstance(message, AssistantMessage):
            names |= {call.id: call.function.name for call in message.tool_calls or ()}
        elif isinstance(message, ToolMessage):
            plain["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                plain["name"] = names[message.tool_call_id]
        written.append(plain)
    return written


def check_arguments(messages: Sequence[Message]) -> None:
    """Arguments of calls are JSON inside a text, which the count of the body has not seen."""
    room = MAX_VALUES
    for message in messages:
        for call in (isinstance(message, AssistantMessage) and message.tool_calls) or ():
            room -= check_size(call.function.arguments.encode(), room)


def template_tool(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _content(content: str | Sequence[TextPart | ImagePart] | None) -> str | list[dict[str, Any]]:
    """Text, or parts where some are images."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image", "image": part.image_url.url}
        for part in content
    ]


def _template_call(call: MadeCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they need the object and not its text."""
    arguments: Any = call.function.arguments
    try:
        arguments = from_json(arguments)
    except ValueError:  # not JSON: the template gets the text that the client sent
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
