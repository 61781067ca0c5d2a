"""`PromptEncoder`: how the options of a run turn a prompt into text, token ids and pixels.

It binds `encode_prompt` to a tokenizer, a processor, the tool schemas and the options, for the
dataset that measures prompts and for code that wants token ids in its rows (`PromptRow`).

A row has images and videos in columns; `<image>` or `<video>` in its messages marks where each
belongs. Every mark becomes a part of the message that holds its image, the form that chat templates
of vision models expect. Pixels are read when a prompt is measured or sent; resizing is left to the
model's processor.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
from verl.utils.dataset.prompts import (
    Prompt,
    PromptTooLong,
    encode_prompt,
    prompt_text,
    shield,
    truncate,
)
from verl.utils.dataset.tables import DataError
from verl.utils.import_utils import require

PADDED = ("input_ids", "attention_mask", "position_ids")
Column = Callable[[], Any]


def load_image(value: Any) -> Any:
    """An RGB image from an image, bytes, a path, or `{"bytes": ...}` / `{"path": ...}`."""
    Image = require("PIL.Image")
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "image") if value.get(key)), None)
    source = io.BytesIO(value) if isinstance(value, bytes) else value
    if isinstance(source, str):
        source = Path(source.removeprefix("file://")).expanduser()
    if not isinstance(source, io.BytesIO | Path):
        raise DataError(f"an image is {value!r:.80}; it must be an image, its bytes or its path")
    try:
        with Image.open(source) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"an image cannot be read ({error}): {value!r:.80}") from error


def load_video(part: Mapping[str, Any]) -> list[Any]:
    """The frames of a video that is given as frames; `nframes` takes that many, evenly spread."""
    frames = part["video"]
    if isinstance(frames, Mapping):
        frames = frames.get("video")
    if isinstance(frames, str | bytes) or not isinstance(frames, Sequence) or not frames:
        raise DataError(
            f"a video is {frames!r:.80}; it must be a list of frames. Decode video files when the "
            "data is prepared"
        )
    count = min(int(part.get("nframes") or len(frames)), len(frames))
    return [load_image(frames[index * len(frames) // count]) for index in range(count)]


class PromptEncoder:
    """Prompts with images or videos need `processor`; all others need only `tokenizer`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        config: DataConfig,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.tools = list(tools)

    def text(self, prompt: Prompt) -> str:
        kwargs = self.config.apply_chat_template_kwargs
        return prompt_text(prompt, self.tokenizer, tools=self.tools, template_kwargs=kwargs)

    def ids(self, prompt: Prompt, truncation: str | None = None) -> list[int]:
        """At most `data.max_prompt_length` token ids, cut as `truncation` says."""
        limit, truncation = self.config.max_prompt_length, truncation or self.config.truncation
        if has_media(prompt):
            return truncate(list(self.processed(prompt)["input_ids"][0]), limit, truncation)
        return encode_prompt(
            prompt,
            self.tokenizer,
            max_tokens=limit,
            truncation=truncation,
            tools=self.tools,
            template_kwargs=self.config.apply_chat_template_kwargs,
        )

    def fault(self, prompt: Prompt) -> Exception | None:
        """Why a prompt cannot be sent as a whole: it is too long, or the template refuses it."""
        try:
            if not has_media(prompt):
                text = self.text(prompt)
                if text.isascii() and len(text) <= self.config.max_prompt_length - 2:
                    return None  # a token is a character or more; two may be added around the text
            self.ids(prompt, truncation="error")
        except (PromptTooLong, TemplateError, TypeError, DataError) as fault:
            return fault
        return None

    def processed(self, prompt: Prompt) -> Mapping[str, Any]:
        """What the processor makes of a prompt with images: ids with places for them, pixels."""
        assert not isinstance(prompt, str)
        _, marks = shield(prompt, self.tokenizer)
        if marks.texts:  # a processor takes text, in which they would be control tokens
            raise DataError(
                f"its words hold the special tokens {sorted(marks.texts.values())}, which cannot "
                "be sent as text beside images and videos; take them out of the row"
            )
        images, videos = load_media(prompt)
        media = {"images": images, "videos": videos}
        return self.processor(
            text=[self.text(prompt)], **{name: found for name, found in media.items() if found}
        )

    def offered(self, prompt: Prompt) -> dict[str, Column]:
        """The columns that a row can be asked for."""
        columns: dict[str, Column] = {
            "full_prompts": partial(self.text, prompt),
            "raw_prompt_ids": partial(self.ids, prompt),
            **{name: partial(self._padded, prompt, name) for name in PADDED},
        }
        if has_media(prompt):
            columns["multi_modal_data"] = partial(self._media, prompt)
            if self.config.return_multi_modal_inputs:
                columns["multi_modal_inputs"] = partial(self._media_inputs, prompt)
        return columns

    def _padded(self, prompt: Prompt, name: str) -> Tensor:
        pad = self.tokenizer.pad_token_id
        if not isinstance(pad, int):
            raise ValueError("the tokenizer has no pad token; load it with hf_tokenizer")
        return padded_prompt(self.ids(prompt), self.config.max_prompt_length, pad)[name]

    def _media(self, prompt: Prompt) -> dict[str, list[Any]]:
        assert not isinstance(prompt, str)
        images, videos = load_media(prompt)
        return {name: found for name, found in (("image", images), ("video", videos)) if found}

    def _media_inputs(self, prompt: Prompt) -> dict[str, Any]:
        outputs = dict(self.processed(prompt))
        return {name: value for name, value in outputs.items() if name not in PADDED}


def has_media(prompt: Prompt) -> bool:
    """Whether a message has a part that is an image or a video."""
    return not isinstance(prompt, str) and any(
        part.get("type") in ("image", "video")
        for message in prompt
        if isinstance(message["content"], list)
        for part in message["content"]
    )


class PromptRow(dict[str, Any]):
    """A dictionary with further entries, `offered`, that are computed when they are read."""

    def __init__(self, columns: dict[str, Any], offered: dict[str, Column]) -> None:
        super().__init__(columns)
        self.offered = offered

    def __missing__(self, name: str) -> Any:
        if name not in self.offered:
            raise KeyError(name)
        self[name] = value = self.offered[name]()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what is there travels to other processes."""
        return dict, (dict(self),)


def padded_prompt(ids: list[int], length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `position_ids`, (length,) each, padded on the left."""
    padding = length - len(ids)
    return {
        "input_ids": torch.tensor([pad_token_id] * padding + ids),
        "attention_mask": torch.tensor([0] * padding + [1] * len(ids)),
        "position_ids": torch.tensor([0] * padding + list(range(len(ids)))),
    }


MARKS = {"<image>": "image", "<video>": "video"}
Media = Sequence[Any]


def media_fault(prompt: Any, images: Media, videos: Media) -> str | None:
    """Why the images and videos of a row do not fit its prompt, or None."""
    for mark, kind, media in (("<image>", "image", images), ("<video>", "video", videos)):
        expected = num_marks(prompt, mark, kind)
        if media and expected != len(media):
            return f"has {len(media)} {kind}s and {expected} places for them ({mark}) in its prompt"
    return None


def num_marks(prompt: Any, mark: str, kind: str) -> int:
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    count = 0
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            count += content.count(mark)
        else:
            count += sum(part.get("type") == kind for part in content or ())
    return count


def with_media(
    messages: Sequence[Mapping[str, Any]], images: Media, videos: Media
) -> list[dict[str, Any]]:
    """Messages whose marks are replaced by parts, each with its image or video."""
    if not images and not videos:
        return [dict(message) for message in messages]
    left = {"image": iter(images), "video": iter(videos)}
    is_used = {"image": bool(images), "video": bool(videos)}
    return [
        {**message, "content": list(parts_of(message["content"], left, is_used))}
        for message in messages
    ]


def parts_of(
    content: Any, left: Mapping[str, Iterator[Any]], is_used: Mapping[str, bool]
) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        for piece in re.split("(<image>|<video>)", content):
            kind = MARKS.get(piece)
            if kind is not None and is_used[kind]:
                yield media_part(kind, next(left[kind]))
            elif piece:
                yield {"type": "text", "text": piece}
        return
    for part in content or ():
        kind = part.get("type")
        if kind in is_used and is_used[kind] and part.get(kind) is None:
            yield media_part(kind, next(left[kind]))
        else:
            yield {name: value for name, value in part.items() if value is not None}


def media_part(kind: str, value: Any) -> dict[str, Any]:
    """`{"image": path}` and `{"video": path, "fps": 2}` keep their further settings."""
    if isinstance(value, Mapping) and value.get(kind) is not None:
        settings = {name: setting for name, setting in value.items() if setting is not None}
        return {**settings, "type": kind}
    return {"type": kind, kind: value}


# ---- loading -------------------------------------------------------------------------------------


def load_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The images and the videos (lists of frames) of messages, in their order."""
    images: list[Any] = []
    videos: list[Any] = []
    for message in messages:
        if isinstance(message["content"], str):
            continue
        for part in message["content"] or ():
            if part.get("type") == "image":
                images.append(load_image(part["image"]))
            elif part.get("type") == "video":
                videos.append(load_video(part))
    return images, videos


def schema_without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: schema_without_nulls(value) for key, value in schema.items() if value is not None
        }
    if isinstance(schema, list):
        return [schema_without_nulls(value) for value in schema]
    return schema
