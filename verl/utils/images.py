"""Images from wherever they are: bytes, files, `data:` URLs.

Files of images come from strangers. What cannot be read, is of another format than `FORMATS`, has
more pixels than `MAX_PIXELS`, or is an address on a network is refused with its reason; nothing is
downloaded.
"""

import base64
import binascii
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.import_utils import require

MAX_PIXELS = 50_000_000
MAX_IMAGE_BYTES = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Pillow reads many more; PostScript among them, for which it runs a program."""

DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)


class BadImage(ValueError):
    """An image that cannot be used; the message says why."""


def open_image(value: Any) -> Any:
    """An RGB image from an image, bytes, a path, a `data:` URL, or `{"bytes": ...}` /
    `{"path": ...}`."""
    Image = require("PIL.Image", "vlm")
    if isinstance(value, Image.Image):
        refuse_size(value)
        return value.convert("RGB")
    if isinstance(value, Mapping):
        keys = ("bytes", "path", "image", "image_url", "url")
        value = next((value[key] for key in keys if value.get(key)), None)
    if isinstance(value, Mapping):  # {"image_url": {"url": ...}}
        value = value.get("url")
    source = io.BytesIO(value) if isinstance(value, bytes) else value
    if isinstance(source, str):
        source = source_of(source)
    if not isinstance(source, io.BytesIO | Path):
        raise BadImage(f"an image is {value!r:.80}; it must be an image, its bytes or its path")
    try:
        with Image.open(source, formats=FORMATS) as image:
            refuse_size(image)
            return image.convert("RGB")
    except BadImage:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
        raise BadImage(f"an image cannot be read ({error}): {value!r:.80}") from error


def source_of(text: str) -> io.BytesIO | Path:
    """The content of a `data:` URL, or a path."""
    if text.startswith("data:"):
        found = DATA_URL.match(text[: MAX_IMAGE_BYTES * 4 // 3 + 100])
        if found is None or len(text) > MAX_IMAGE_BYTES * 4 // 3 + 100:
            raise BadImage(
                f"an image is {text[:40]!r}...; a data URL is data:image/TYPE;base64,..., of "
                f"{MAX_IMAGE_BYTES:,} bytes at most"
            )
        try:
            return io.BytesIO(base64.b64decode(found[1], validate=True))
        except binascii.Error as error:
            raise BadImage(f"an image is a data URL that is not base64: {error}") from error
    if re.match(r"[a-z][a-z0-9+.-]*://", text) and not text.startswith("file://"):
        raise BadImage(
            f"an image is {text!r:.80}, an address on a network; nothing is downloaded while rows "
            "are read: fetch it when the data is prepared, and give its bytes or its path"
        )
    return Path(text.removeprefix("file://")).expanduser()


def refuse_size(image: Any) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"an image has {width} x {height} pixels; {MAX_PIXELS:,} are the most that are read: "
            "scale it down when the data is prepared"
        )


def as_png(image: Any) -> bytes:
    """The bytes of a PNG file with that image, without loss."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
