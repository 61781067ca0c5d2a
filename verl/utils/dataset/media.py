"""Images of prompts: loaded, checked, and turned into tokens and pixels for a model.

A row has images in a column; `<image>` in its messages marks where each belongs. Every mark becomes
a part of the message that holds its image, the form that chat templates of vision models expect.
The template writes one placeholder token for each part; words of a message that look like one are
shielded first, so the placeholders in the ids are those of the parts, in their order. Each is
replaced by the tokens that the processor counts for its image. A number that does not match is
refused: nothing is guessed.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import (
    PART_TYPES,
    PromptTooLong,
    media_parts,
    render,
    shield,
)
from verl.utils.dataset.tables import DataError
from verl.utils.images import BadImage, open_image
from verl.utils.import_utils import require
from verl.utils.media import Media, content_hash

MAX_REMEMBERED_IMAGES = 256
MARKS = {"<image>": "image", "<video>": "video"}
Values = Sequence[Any]


# ---- loading -------------------------------------------------------------------------------------


class UnreadableImage(DataError):
    """An image of a row that cannot be used."""


def load_image(value: Any) -> Any:
    """`open_image`, whose refusals are faults of the data here."""
    try:
        return open_image(value)
    except BadImage as error:
        raise UnreadableImage(str(error)) from error


def load_video(part: Mapping[str, Any]) -> list[Any]:
    """The frames of a video that is given as frames; `nframes` takes that many, evenly spread."""
    frames = part["video"]
    if isinstance(frames, Mapping):
        frames = frames.get("video")
    if isinstance(frames, str | bytes) or not isinstance(frames, Sequence) or not frames:
        raise DataError(
            f"a video is {frames!r:.80}; it must be a list of frames, each an image: there is no "
            "decoder for video files here. Decode them when the data is prepared"
        )
    count = min(int(part.get("nframes") or len(frames)), len(frames))
    return [load_image(frames[index * len(frames) // count]) for index in range(count)]


def load_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The images and the videos (lists of frames) of messages, in their order."""
    images: list[Any] = []
    videos: list[Any] = []
    for part in media_parts(messages):
        if part["type"] == "video":
            videos.append(load_video(part))
        else:
            images.append(load_image(part.get("image", part)))
    return images, videos


# ---- places --------------------------------------------------------------------------------------


def media_fault(prompt: Any, images: Values, videos: Values) -> str | None:
    """Why the images and videos of a row do not fit its prompt, or None."""
    for mark, kind, values in (("<image>", "image", images), ("<video>", "video", videos)):
        expected = num_marks(prompt, mark, kind)
        if values and expected != len(values):
            return (
                f"has {len(values)} {kind}s and {expected} places for them ({mark}) in its prompt"
            )
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
    messages: Sequence[Mapping[str, Any]], images: Values, videos: Values
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


def with_frames(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the frames of each video, in order, as images in its place."""

    def parts(content: Any) -> Iterator[Mapping[str, Any]]:
        for part in content:
            if part.get("type") == "video":
                yield from ({"type": "image", "image": frame} for frame in load_video(part))
            else:
                yield part

    return [
        dict(message)
        if isinstance(message["content"], str | None)
        else {**message, "content": list(parts(message["content"]))}
        for message in messages
    ]


# ---- tokens and pixels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Expansion:
    """One image as the processor prepares it."""

    ids: list[int]
    """The tokens that take the place of the template's placeholder."""

    media: Media
    """Its places are within `ids`."""


class MediaEncoder:
    """Prompts with images, for a tokenizer and the processor of its model.

    `options` are further arguments of the image processor, `max_images` bounds those of a prompt.
    Serves any thread.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        options: Mapping[str, Any] | None = None,
        *,
        max_images: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._processor = processor
        self.options = dict(options or {})
        self.max_images = max_images
        self._expansions: OrderedDict[str, Expansion] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """What is remembered stays here."""
        return MediaEncoder.again, (self.tokenizer, self._processor, self.options, self.max_images)

    @classmethod
    def again(
        cls, tokenizer: Any, processor: Any, options: dict[str, Any], max_images: int | None
    ) -> "MediaEncoder":
        return cls(tokenizer, processor, options, max_images=max_images)

    @property
    def processor(self) -> Any:
        if self._processor is None:
            raise DataError(
                "there are images, and the model has no processor for them; choose a model that "
                "sees, or leave them out"
            )
        return self._processor

    def encode_prompt(
        self,
        prompt: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], tuple[Media, ...]]:
        """Token ids of a prompt and its images. One that is too long is refused, never cut: an
        image without some of its tokens is no image."""

        def ids_of(messages: Sequence[Mapping[str, Any]]) -> list[int]:
            shielded, marks = shield(messages, self.tokenizer)
            text = render(
                shielded,
                self.tokenizer,
                add_generation_prompt=True,
                tools=tools,
                template_kwargs=template_kwargs,
            )
            return marks.encode(text, self.tokenizer)

        ids, media = self.encode(prompt, ids_of)
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, {sum(len(m.places) for m in media)} of them of "
                f"{len(media)} images; data.max_prompt_length allows {max_tokens}, and a prompt "
                "with images is never cut. Raise it, let the processor make images smaller "
                "(data.mm_processor_kwargs), or set data.filter_overlong_prompts=True"
            )
        return ids, media

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        ids_of: Callable[[Sequence[Mapping[str, Any]]], list[int]],
    ) -> tuple[list[int], tuple[Media, ...]]:
        """What `ids_of` makes of messages, its placeholders expanded. It is given the messages
        without the content of images."""
        messages = with_frames(messages)
        images, _ = load_media(messages)
        if self.max_images is not None and len(images) > self.max_images:
            raise DataError(
                f"the prompt has {len(images)} images; rollout.limit_images allows "
                f"{self.max_images}"
            )
        return self.place(ids_of(without_content(messages)), images)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Load and resize the images of messages, so that they are known when it comes to them."""
        images, _ = load_media(with_frames(messages))
        for image in images:
            self.expansion(image)

    def place(self, ids: list[int], images: Sequence[Any]) -> tuple[list[int], tuple[Media, ...]]:
        """Replace each placeholder token by the tokens of its image, in order."""
        placeholder = self.processor.image_token_id
        num_places = ids.count(placeholder)
        if num_places != len(images):
            raise DataError(
                f"there are {len(images)} images and {num_places} placeholders "
                f"({self.processor.image_token!r}) in what the chat template writes; it must write "
                "one for each part of type image: set data.chat_template to one that does"
            )
        expanded: list[int] = []
        media: list[Media] = []
        left = iter(images)
        for token in ids:
            if token != placeholder:
                expanded.append(token)
                continue
            expansion = self.expansion(next(left))
            media.append(expansion.media.shifted(len(expanded)))
            expanded += expansion.ids
        return expanded, tuple(media)

    def find(self, ids: list[int], images: Sequence[Any]) -> tuple[Media, ...]:
        """The media of ids that hold the tokens of these images already, in order.

        For callers that keep ids and images apart. Every placeholder must belong to an image.
        """
        media: list[Media] = []
        start = 0
        for image in images:
            expansion = self.expansion(load_image(image))
            start = index_of(expansion.ids, ids, start)
            if start < 0:
                break
            media.append(expansion.media.shifted(start))
            start += len(expansion.ids)
        num_found = sum(len(one.places) for one in media)
        num_places = ids.count(self.processor.image_token_id)
        if len(media) < len(images) or num_found != num_places:
            raise ValueError(
                f"{len(images)} images belong to a prompt with {num_places} placeholder tokens, of "
                f"which {num_found} were found for {len(media)} images; pass the images in the "
                "order of the prompt, each once, or pass `media`"
            )
        return tuple(media)

    def expansion(self, image: Any) -> Expansion:
        """The tokens and pixels of an image; those of the last images are remembered."""
        key = sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).hexdigest()
        with self._lock:
            known = self._expansions.get(key)
            if known is not None:
                self._expansions.move_to_end(key)
                return known
        expansion = self._expand(image)
        with self._lock:
            self._expansions[key] = expansion
            if len(self._expansions) > MAX_REMEMBERED_IMAGES:
                self._expansions.popitem(last=False)
        return expansion

    def _expand(self, image: Any) -> Expansion:
        processor = self.processor
        try:
            outputs = processor.image_processor(
                images=[image], return_tensors="pt", **{**usual_options(processor), **self.options}
            )
        except ValueError as error:  # such as a strip of one by a thousand pixels
            text = f"the processor refuses an image of {image.size}: {error}"
            raise UnreadableImage(text) from error
        text = processor.replace_image_token(outputs, 0)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        inputs = {
            name: value
            for name, value in outputs.items()
            if isinstance(value, Tensor) and name not in ("rows", "cols")
        }
        (places,) = np.nonzero(np.array(ids) == processor.image_token_id)
        return Expansion(
            ids,
            Media(
                kind="image",
                content_hash=content_hash(inputs),
                inputs=inputs,
                places=places,
                grid=grid_of(processor, inputs),
                span=(0, len(ids)),
                source=image,
            ),
        )


def usual_options(processor: Any) -> dict[str, Any]:
    """What a processor calls its image processor with."""
    return dict(processor.valid_processor_kwargs._defaults.get("images_kwargs", {}))


def index_of(part: list[int], ids: list[int], start: int) -> int:
    """Where `part` is in `ids`, from `start` on; -1 if nowhere."""
    last = len(ids) - len(part)
    return next((i for i in range(start, last + 1) if ids[i : i + len(part)] == part), -1)


def media_encoder_of(
    tokenizer: PreTrainedTokenizerBase,
    processor: Any,
    options: Mapping[str, Any] | None = None,
    *,
    max_images: int | None = None,
) -> MediaEncoder:
    """The `MediaEncoder` of these arguments; what one remembers serves all who ask again."""
    return _media_encoder(
        tokenizer, processor, json.dumps(dict(options or {}), sort_keys=True), max_images
    )


@lru_cache(maxsize=16)
def _media_encoder(
    tokenizer: PreTrainedTokenizerBase, processor: Any, options: str, max_images: int | None
) -> MediaEncoder:
    made = MediaEncoder(tokenizer, processor, json.loads(options), max_images=max_images)
    if made.options and processor is not None:
        refuse_options(made)
    return made


def refuse_options(encoder: MediaEncoder) -> None:
    """Raise ValueError where the image processor does not take its options; rows are not to blame
    for them."""
    image = require("PIL.Image", "vlm").new("RGB", (64, 64))
    try:
        encoder.expansion(image)
    except Exception as error:
        raise ValueError(
            f"data.mm_processor_kwargs is {encoder.options}, which "
            f"{type(encoder.processor.image_processor).__name__} refuses: {error}"
        ) from error


def grid_of(processor: Any, inputs: Mapping[str, Tensor]) -> tuple[int, int, int] | None:
    """Tokens of an image in time, height and width, where the tower is told of a grid."""
    if "image_grid_thw" not in inputs:
        return None
    merged = processor.image_processor.merge_size
    time, height, width = inputs["image_grid_thw"][0].tolist()
    return time, height // merged, width // merged


def without_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template is given them: an image is its type."""

    def bare(part: Any) -> Any:
        is_media = isinstance(part, Mapping) and part.get("type") in PART_TYPES
        return {"type": "image"} if is_media else part

    return [
        {**message, "content": [bare(part) for part in message["content"]]}
        if isinstance(message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]
