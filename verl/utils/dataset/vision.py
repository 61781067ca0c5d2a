"""Images and videos of a prompt: where they stand in its messages, and how they are loaded.

A row has them in columns, and `<image>` or `<video>` in its messages says where each belongs. Here
every such mark becomes a part of the message that holds its image, the form that chat templates of
vision models expect. Pixels are read when a prompt is measured or sent, not before. Resizing is
left to the model's processor.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.dataset.tables import DataError
from verl.utils.import_utils import require

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
    return [load_image(frames[place * len(frames) // count]) for place in range(count)]
