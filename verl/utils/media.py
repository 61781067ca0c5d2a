"""Images of a sequence: what the vision tower is given, and which tokens its features stand in for.

    ids      T  T  <s>  I  I  I  I  </s>  T        I: places of one image, given by whoever put it
    places               3  4  5  6                there; never found by token id

An image is expanded to its tokens once, when it enters the conversation; later turns append. Two
images behind equal tokens are two prompts, so identity is tokens plus `content_hash`. Media are
referred to, never copied: all samples of a prompt hold the same object, and it goes with the last.

Models with multimodal rotary embeddings (arXiv:2409.12191) give an image positions in three axes.
With s the next position, an image of h x w tokens takes

    (s, s + row, s + column)     and the text after it goes on at s + max(h, w)

so positions run behind token counts by a number that stays the same after the last image.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

MEDIA = "media"
"""The column with the media of each row, as plain data (`Media.as_plain`); None where it has none.
It is there where some row has media."""


@dataclass(frozen=True, eq=False)
class Media:
    """One image of a sequence."""

    kind: str
    """`image`."""

    content_hash: str
    """Of `inputs`: equal for equal content only."""

    inputs: Mapping[str, Tensor]
    """Arguments of the model's vision tower, for this image alone."""

    places: np.ndarray
    """(n,) indices of the tokens of the sequence that the tower's n features stand in for."""

    grid: tuple[int, int, int] | None = None
    """Tokens in time, height and width, for multimodal rotary embeddings; None without these."""

    span: tuple[int, int] | None = None
    """First token that stands for the image, marks around it included, and the one behind them."""

    source: Any = None
    """The image itself, or the bytes of its file, for engines that have a processor of their own;
    None where nobody needs it."""

    def shifted(self, num_tokens: int) -> "Media":
        """The same in a sequence that has so many more tokens before it."""
        if not num_tokens:
            return self
        span = None if self.span is None else (self.span[0] + num_tokens, self.span[1] + num_tokens)
        return replace(self, places=self.places + num_tokens, span=span)

    def as_plain(self) -> dict[str, Any]:
        """Plain data for training, for columns of a batch; tensors are not copied."""
        return {**vars(self), "inputs": dict(self.inputs), "source": None}


def media_of(plain: Iterable[Mapping[str, Any]] | None) -> tuple[Media, ...]:
    """What an entry of the column `media` stands for."""
    return tuple(Media(**entry) for entry in plain or ())


def content_hash(inputs: Mapping[str, Tensor]) -> str:
    """A hash of the tower's arguments: names, types, shapes and values."""
    digest = sha256()
    for name, tensor in sorted(inputs.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_of_all(media: Iterable[Media]) -> str:
    """Identity of several: contents and places; "" for none."""
    digest = sha256()
    media = list(media)
    for one in media:
        digest.update(f"{one.kind} {one.content_hash} {one.places.tolist()}".encode())
    return digest.hexdigest() if media else ""


def identity_ids(ids: list[int], media: Sequence[Media]) -> list[int]:
    """Tokens by which sequences are compared: where an image is, its content counts.

    The same list where there is none.
    """
    if not media:
        return ids
    marked = np.array(ids, dtype=np.int64)
    for one in media:
        inside = one.places[one.places < len(marked)]
        marked[inside] = -1 - int(one.content_hash[:15], 16)
    return marked.tolist()


def unexpanded(ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """The ids with one placeholder for each image, for engines that expand these themselves."""
    result: list[int] = []
    done = 0
    for one in media:
        assert one.span is not None, "whoever expands an image says how far it goes"
        start, end = one.span
        result += [*ids[done:start], ids[int(one.places[0])]]
        done = end
    return [*result, *ids[done:]]


def rope_positions(num_tokens: int, media: Sequence[Media]) -> np.ndarray | None:
    """(3, num_tokens) positions in time, height and width; None where they are 0, 1, 2, ..."""
    if all(one.grid is None for one in media):
        return None
    parts: list[np.ndarray] = []
    num_before, position = 0, 0
    for one in sorted(media, key=lambda m: int(m.places[0])):
        assert one.grid is not None, "a model has these positions or has not"
        start = int(one.places[0])
        num_text = start - num_before
        parts.append(np.broadcast_to(np.arange(num_text) + position, (3, num_text)))
        position += num_text
        axes = np.meshgrid(*map(np.arange, one.grid), indexing="ij")
        parts.append(np.stack([axis.ravel() for axis in axes]) + position)
        position += max(one.grid[1:])
        num_before = start + len(one.places)
    num_text = num_tokens - num_before
    parts.append(np.broadcast_to(np.arange(num_text) + position, (3, num_text)))
    return np.concatenate(parts, axis=1)


def rope_delta(media: Sequence[Media]) -> int:
    """How much larger than its index the position of a token behind all media is."""
    grids = [(len(one.places), one.grid) for one in media if one.grid is not None]
    return sum(max(grid[1:]) - num_tokens for num_tokens, grid in grids)
