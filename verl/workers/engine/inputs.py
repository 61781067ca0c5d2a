"""`ModelInputs`: the padded rows of a micro-batch as the packed tokens that a model takes.

    rows      [pad A a1 pad] [pad A a2 pad] [pad B b1 pad]
    whole     A a1 A a2 B b1                  every row end to end
    shared    A B a1 a2 b1                    each prompt once, prompts first

The log-probability (or value) of a response token is read at the token before it. Outputs return to
(B, T), zero where a response has no token, so they do not show how the rows were packed.

Which rows share a prompt is known from the batch (`prompt_index`, from `uid`), or found by the
identity of their prompts: tokens, and the hash of the media among them. Prompts are numbered by
their first appearance, so a pass depends on its rows alone.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.models.shared_prompts import SharedPrompts
from verl.models.ulysses import SequenceShard
from verl.models.vision import PlacedMedia
from verl.utils.device import without_waiting
from verl.utils.media import Media, hash_of_all

PROMPT_INDEX = "prompt_index"
"""(B,) the same number for rows with the same prompt; a column that need not be there."""

MEDIA_HASH = "media_hash"
"""(B,) a hash of the images of a row; a column that need not be there."""

MEDIA_ROW = "media_row"
"""(B,) the entry of `MEDIA_TABLE` that a row has; it is there where the table is."""

MEDIA_TABLE = "media_table"
"""No column: a list with the media of rows, which all parts of a batch refer to."""

HOST_COLUMNS = (
    "input_ids", "attention_mask", "position_ids", "responses",
    PROMPT_INDEX, MEDIA_HASH, MEDIA_ROW,
)  # fmt: skip
"""Columns that packing reads, so they must be in CPU memory."""


@dataclass(frozen=True)
class ModelInputs:
    """Packed tokens and all else that a forward pass takes; R response tokens in N tokens."""

    input_ids: Tensor
    """(N,) tokens."""

    position_ids: Tensor
    """(N,) position of each token in its own sequence; (3, N) with M-RoPE."""

    parts: list[int] | SharedPrompts
    """Tokens of each sequence, or how prompts are shared."""

    sources: Tensor
    """(R,) the token whose hidden state predicts each response token."""

    targets: Tensor
    """(R,) the response tokens."""

    index: Tensor
    """(R,) where each belongs in the flattened (B, T) response block."""

    shape: tuple[int, int]
    """(B, T)."""

    media: list[PlacedMedia] = field(default_factory=list)
    """Images among the tokens."""

    gather: Callable[[Tensor], Tensor] | None = None
    """Where ranks split the tokens: from this rank's values to all (R,) of them."""

    own: Tensor | None = None
    """Where ranks split the tokens: which of the R response tokens are this rank's."""

    @classmethod
    def of(cls, rows: TensorDict, *, prefix_sharing: bool) -> "ModelInputs":
        """Pack the rows; with `prefix_sharing` each prompt once, where some rows share one."""
        real = rows["attention_mask"].bool()
        num_prompt_columns = real.shape[1] - rows["responses"].shape[1]
        if prefix_sharing:
            owners = prompt_owners(rows, num_prompt_columns)
            is_shared = len(set(owners)) < len(owners)
            if is_shared and bool(real[:, :num_prompt_columns].any(1).all()):
                return pack_shared(rows, real, num_prompt_columns, torch.tensor(owners))
        return pack_whole(rows, real, num_prompt_columns)

    def unpack(self, values: Tensor) -> Tensor:
        """(R,) values to their positions in (B, T), zeros elsewhere; differentiable.

        Values may have further dimensions, which stay.
        """
        if self.gather is not None:
            values = self.gather(values)
        blank = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
        return blank.index_copy(0, self.index, values).view(*self.shape, *values.shape[1:])

    @property
    def own_index(self) -> Tensor:
        """`index` of this rank's response tokens."""
        return self.index if self.own is None else self.index[self.own]

    def pick(self, column: Tensor) -> Tensor:
        """(B, T, ...) to (R, ...): the entries of this rank's response tokens."""
        return column.flatten(0, 1)[self.own_index]

    def to(self, device: torch.device) -> "ModelInputs":
        """On the device, without waiting for it."""
        return replace(
            self,
            input_ids=without_waiting(self.input_ids, device),
            position_ids=without_waiting(self.position_ids, device),
            sources=without_waiting(self.sources, device),
            targets=without_waiting(self.targets, device),
            index=without_waiting(self.index, device),
        )

    def shard(self, shard: SequenceShard) -> "ModelInputs":
        """The tokens, sources, targets and images of one of the ranks that split them.

        Of an image across two shards each rank has the features in its own; both run the tower, and
        the gradients of its weights add up.
        """
        begin = shard.rank * shard.tokens_per_rank
        positions = shard.select(self.position_ids.movedim(-1, 0)).movedim(0, -1)
        return replace(
            self,
            input_ids=shard.select(self.input_ids),
            position_ids=positions,
            sources=shard.sources,
            targets=self.targets[shard.rows],
            gather=shard.gather,
            own=shard.rows,
            media=[
                (one, features[is_own], places[is_own] - begin)
                for one, features, places in self.media
                if (is_own := (places >= begin) & (places < begin + shard.tokens_per_rank)).any()
            ],
        )


def prompt_groups(data: TensorDict) -> list[int]:
    """A number for each row, the same for rows with one prompt, which stay in one micro-batch."""
    if PROMPT_INDEX in data.keys():  # noqa: SIM118 (a TensorDict)
        return data[PROMPT_INDEX].tolist()
    return same_prompts(data, data["input_ids"].shape[1] - data["responses"].shape[1])


def first_appearance(keys: Iterable[Hashable]) -> list[int]:
    """A number for each key, counted up as new ones appear."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def prompt_owners(rows: TensorDict, num_prompt_columns: int) -> list[int]:
    """The prompt that each row may share, numbered by first appearance.

    A loop may give the samples of one `uid` different prompts. Then tokens decide.
    """
    if PROMPT_INDEX in rows.keys():  # noqa: SIM118 (a TensorDict)
        owners = first_appearance(rows[PROMPT_INDEX].tolist())
        first_rows: dict[int, int] = {}
        first = torch.tensor([first_rows.setdefault(o, row) for row, o in enumerate(owners)])
        if all(torch.equal(part, part[first]) for part in prompt_parts(rows, num_prompt_columns)):
            return owners
    return same_prompts(rows, num_prompt_columns)


def same_prompts(rows: TensorDict, num_prompt_columns: int) -> list[int]:
    """The same number for rows whose prompts have the same tokens, positions and media."""
    parts = [part.numpy() for part in prompt_parts(rows, num_prompt_columns)]
    keys = (tuple(part[row].tobytes() for part in parts) for row in range(len(rows)))
    return first_appearance(keys)


def prompt_parts(rows: TensorDict, num_prompt_columns: int) -> list[Tensor]:
    """What identifies a prompt: tensors in CPU memory with a row for each row of the batch."""
    mask = rows["attention_mask"][:, :num_prompt_columns].cpu().bool()
    ids = rows["input_ids"][:, :num_prompt_columns].cpu()
    parts = [torch.where(mask, ids, -1)]
    if "position_ids" in rows.keys():  # noqa: SIM118 (a TensorDict)
        positions = rows["position_ids"][..., :num_prompt_columns].cpu()
        parts.append(torch.where(mask if positions.dim() == 2 else mask[:, None], positions, -1))
    if MEDIA_HASH in rows.keys():  # noqa: SIM118 (a TensorDict)
        parts.append(rows[MEDIA_HASH].cpu())
    return parts


def pack_whole(rows: TensorDict, real: Tensor, num_prompt_columns: int) -> ModelInputs:
    """Every row end to end; `real` (B, L) is False for padding."""
    is_response = real.clone()
    is_response[:, :num_prompt_columns] = False
    refuse_missing_prompts(real, is_response)
    token_index = real.flatten().cumsum(0).view_as(real) - 1
    return ModelInputs(
        input_ids=rows["input_ids"][real],
        position_ids=tokens_of(rows["position_ids"], real),
        parts=real.sum(1).tolist(),
        sources=token_index[is_response] - 1,
        targets=rows["input_ids"][is_response],
        index=is_response[:, num_prompt_columns:].flatten().nonzero().squeeze(1),
        shape=(real.shape[0], real.shape[1] - num_prompt_columns),
        media=[
            placed
            for media, start in zip(media_of_rows(rows), row_starts(real), strict=True)
            for placed in placed_between(media, 0, None, start)
        ],
    )


def pack_shared(
    rows: TensorDict, real: Tensor, num_prompt_columns: int, owners: Tensor
) -> ModelInputs:
    """Each prompt once, then all responses, those of a prompt together; `owners` (B,) are the
    prompts of the rows, numbered by first appearance."""
    num_rows, num_response_columns = real.shape[0], real.shape[1] - num_prompt_columns
    order = owners.argsort(stable=True)
    owners = owners[order]
    first = order[torch.searchsorted(owners, torch.arange(int(owners[-1]) + 1))]
    is_prompt, is_response = (
        real[first][:, :num_prompt_columns],
        real[order][:, num_prompt_columns:],
    )
    prompt_lengths = is_prompt.sum(1)
    ids, positions = (
        torch.cat(
            [
                tokens_of(column[first][..., :num_prompt_columns], is_prompt),
                tokens_of(column[order][..., num_prompt_columns:], is_response),
            ],
            dim=-1,
        )
        for column in (rows["input_ids"], rows["position_ids"])
    )
    shared = SharedPrompts(prompt_lengths.tolist(), owners.tolist(), is_response.sum(1).tolist())
    index = order[:, None] * num_response_columns + torch.arange(num_response_columns)
    return ModelInputs(
        input_ids=ids,
        position_ids=positions,
        parts=shared,
        sources=response_sources(is_response, prompt_lengths, owners),
        targets=ids[shared.num_prompt_tokens :],
        index=index[is_response],
        shape=(num_rows, num_response_columns),
        media=shared_media(rows, first.tolist(), order.tolist(), shared),
    )


def attach_media(rows: TensorDict, table: list[tuple[Media, ...]]) -> None:
    """Give rows their images: a table that all parts of the batch refer to."""
    rows[MEDIA_ROW] = torch.arange(len(table))
    rows[MEDIA_HASH] = torch.tensor(first_appearance(prompt_hashes(rows, table)))
    rows.set_non_tensor(MEDIA_TABLE, table)


def prompt_hashes(rows: TensorDict, table: Sequence[Sequence[Media]]) -> list[str]:
    """Identity of the media in each row's prompt."""
    num_columns = rows["attention_mask"].shape[1] - rows["responses"].shape[1]
    lengths = rows["attention_mask"][:, :num_columns].sum(1).tolist()
    return [
        hash_of_all(one for one in media if one.places[-1] < length)
        for media, length in zip(table, lengths, strict=True)
    ]


def media_of_rows(rows: TensorDict) -> list[tuple[Media, ...]]:
    if MEDIA_ROW not in rows.keys():  # noqa: SIM118 (a TensorDict)
        return [()] * len(rows)
    table = rows.get_non_tensor(MEDIA_TABLE)
    return [table[entry] for entry in rows[MEDIA_ROW].tolist()]


def row_starts(real: Tensor) -> list[int]:
    """The first token of each row in a pass over whole rows."""
    lengths = real.sum(1)
    return (lengths.cumsum(0) - lengths).tolist()


def placed_between(
    media: Sequence[Media], begin: int, end: int | None, start: int
) -> Iterator[PlacedMedia]:
    """The part of a row's media in its tokens from `begin` to `end`, which begin at `start`."""
    for one in media:
        is_inside = one.places >= begin
        if end is not None:
            is_inside &= one.places < end
        (features,) = np.nonzero(is_inside)
        if len(features):
            yield one, features, one.places[features] - begin + start


def shared_media(
    rows: TensorDict, first: list[int], order: list[int], shared: SharedPrompts
) -> list[PlacedMedia]:
    """Media of prompts, once each, and of what follows them; `first` are rows that have the
    prompts, `order` the rows of the samples."""
    media = media_of_rows(rows)
    placed: list[PlacedMedia] = []
    for row, (start, length) in zip(first, shared.prompt_spans(), strict=True):
        placed += placed_between(media[row], 0, length, start)
    for row, owner, (start, _) in zip(order, shared.owners, shared.sample_spans(), strict=True):
        placed += placed_between(media[row], shared.prompts[owner], None, start)
    return placed


def tokens_of(column: Tensor, is_chosen: Tensor) -> Tensor:
    """(B, L) to the chosen (n,) tokens; (B, 3, L) to (3, n)."""
    return column.movedim(-1, 1)[is_chosen].movedim(0, -1)


def response_sources(is_response: Tensor, prompt_lengths: Tensor, owners: Tensor) -> Tensor:
    """The token that predicts each response token: the one before it, or the prompt's last."""
    ends = prompt_lengths.cumsum(0)
    index = is_response.flatten().cumsum(0).view_as(is_response) - 1 + ends[-1]
    is_first = is_response & (is_response.cumsum(1) == 1)
    return torch.where(is_first, (ends - 1)[owners][:, None], index - 1)[is_response]


def refuse_missing_prompts(real: Tensor, is_response: Tensor) -> None:
    """A response token without a token before it has nothing to be predicted from."""
    first = is_response.int().argmax(1)
    is_before = torch.arange(real.shape[1], device=real.device)[None, :] < first[:, None]
    starts_with_response = is_response.any(1) & ~(real & is_before).any(1)
    if starts_with_response.any():
        row = int(starts_with_response.nonzero()[0])
        raise ValueError(
            f"row {row} has a response but no prompt token; the first response token has nothing "
            "to be predicted from: give every prompt at least one token (a BOS token will do)"
        )
