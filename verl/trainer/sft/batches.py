"""Which rows each step trains on, on which rank, how they are laid out, and reading ahead.

The order of an epoch is a function of the seed and the epoch alone, so a resumed run goes on with
the same rows. A row becomes [padding, context, trained part, padding], like a prompt and its
response in reinforcement learning, so both use the same engine; nothing is predicted before the
first token that is trained. Ranks take every `num_shares`-th row of a batch; rank 0 reports.

Rows are read and tokenized while the step before them trains:

    this thread             reading threads
      take 1   ---------->    read 1
      train on 1              read 2
      take 2                  ...
      train on 2              read 3

A read begins when the one before it has ended, that of held-out rows too: tokenizers and datasets
need not bear two at a time. The threads are daemons, so a dataset that is stuck does not keep the
program alive.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from verl.config.engine import McoreEngineConfig
from verl.utils.dataset.sft_dataset import SFTDataset, trained_tokens
from verl.utils.dataset.tables import DataError
from verl.utils.distributed import all_reduce_, is_distributed
from verl.utils.media import MEDIA
from verl.workers.engine.inputs import attach_media
from verl.workers.engine.megatron.layout import Layout

Row = dict[str, Any]
"""Columns of one row, tensors; `media` are its images."""


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, *, seed: int, epoch: int) -> Tensor:
    """All rows once, shuffled; (num_rows,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator)


def rows_of_step(step: int, *, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """The rows of training step `step`, which counts from 0 and goes on over epochs.

    Rows that do not fill a batch at the end of an epoch sit it out; each epoch shuffles anew.
    """
    epoch, position = divmod(step, num_rows // batch_size)
    order = epoch_order(num_rows, seed=seed, epoch=epoch)
    return order[position * batch_size : (position + 1) * batch_size].tolist()


def reads_in_order(
    read: Callable[[Sequence[int]], TensorDict], indices: Sequence[int], batch_size: int
) -> Iterator[Callable[[], TensorDict]]:
    """Each gives a batch of these rows, from the first to the last, which may be short."""
    for start in range(0, len(indices), batch_size):
        yield partial(read, indices[start : start + batch_size])


def load_rows(dataset: Dataset[Row], indices: Sequence[int]) -> TensorDict:
    """Rows of a dataset, ready for the engine.

    The mask of `SFTDataset` belongs to the prediction made at a token; that of any other class to
    the token itself.
    """
    is_shifted = isinstance(dataset, SFTDataset)
    rows = []
    for index in indices:
        row = dataset[index]
        mask = trained_tokens(row["loss_mask"]) if is_shifted else row["loss_mask"]
        rows.append({**row, "loss_mask": mask})
    return lay_out(rows)


def lay_out(rows: Sequence[Row]) -> TensorDict:
    """Align rows at their first trained token. Masks are of the tokens themselves."""
    parts = [real_tokens(row) for row in rows]
    contexts = [first_trained(part["loss_mask"]) for part in parts]
    lengths = [len(part["input_ids"]) for part in parts]
    P = max(contexts)
    T = max(1, *(length - context for length, context in zip(lengths, contexts, strict=True)))
    B, L = len(rows), P + T
    columns: dict[str, Any] = {
        name: torch.zeros(B, L, dtype=torch.long)
        for name in ("input_ids", "attention_mask", "position_ids", "loss_mask")
    }
    if any(part["position_ids"].dim() == 2 for part in parts):
        columns["position_ids"] = torch.zeros(B, 3, L, dtype=torch.long)
    for i, (part, context, length) in enumerate(zip(parts, contexts, lengths, strict=True)):
        span = slice(P - context, P - context + length)
        columns["attention_mask"][i, span] = 1
        for name, values in part.items():
            columns[name][i, ..., span] = values
    response_mask = columns.pop("loss_mask")[:, P:]
    columns |= {"responses": columns["input_ids"][:, P:], "response_mask": response_mask}
    laid_out = TensorDict(columns, batch_size=B)
    if any(MEDIA in row for row in rows):
        attach_media(laid_out, [row.get(MEDIA, ()) for row in rows])
    return laid_out


def real_tokens(row: Row) -> Row:
    """The columns of a row without its padding; the first token can never be predicted.

    A row without `attention_mask` has no padding.
    """
    is_real = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
    part = {name: row[name][..., is_real] for name in ("input_ids", "position_ids", "loss_mask")}
    part["loss_mask"] = part["loss_mask"].clone()
    part["loss_mask"][:1] = 0
    return part


def first_trained(loss_mask: Tensor) -> int:
    """Tokens before the first trained one; all of them when none is."""
    trained = loss_mask.nonzero()
    return int(trained[0]) if len(trained) else len(loss_mask)


Read = Callable[[], TensorDict]
Batch = Future[TensorDict]

MAX_SECONDS = 1800.0
"""Timeout of one batch; a dataset that takes longer counts as stuck."""

CLOSE_SECONDS = 60.0


class RowReader:
    """`take` gives a batch and has the next one read; what reading raises is raised there."""

    def __init__(self) -> None:
        self._ahead: dict[int, Batch] = {}
        self._newest: Batch | None = None

    def take(self, number: int, read: Callable[[int], TensorDict], last: int) -> TensorDict:
        """Batch `number`, as `read` gives it; the next one is begun unless this is the last."""
        wanted = self._ahead.pop(number, None) or self._begin(partial(read, number))
        self._ahead = {} if number >= last else {number + 1: self._begin(partial(read, number + 1))}
        return _ended(wanted)

    def each(self, reads: Iterable[Read]) -> Iterator[TensorDict]:
        """What each of them gives, one read ahead."""
        ahead: Batch | None = None
        for read in reads:
            ready, ahead = ahead, self._begin(read)
            if ready is not None:
                yield _ended(ready)
        if ahead is not None:
            yield _ended(ahead)

    def close(self) -> None:
        """Let a read that nobody wants any more end: one that is cut off may abort the program."""
        if self._newest is not None:
            wait([self._newest], timeout=CLOSE_SECONDS)

    def _begin(self, read: Read) -> Batch:
        before, self._newest = self._newest, Future()
        arguments = (read, before, self._newest)
        threading.Thread(target=_run, args=arguments, name="rows", daemon=True).start()
        return self._newest


def _run(read: Read, before: Batch | None, batch: Batch) -> None:
    try:
        if before is not None:
            wait([before], timeout=MAX_SECONDS)
        batch.set_result(read())
    except BaseException as error:  # whoever wants the batch raises it
        batch.set_exception(error)


def _ended(batch: Batch) -> TensorDict:
    done, _ = wait([batch], timeout=MAX_SECONDS)
    if not done:
        raise DataError(
            f"reading a batch has taken {MAX_SECONDS:g} s and is not done; the dataset is stuck, "
            "on a file or a service that does not answer"
        )
    return batch.result(timeout=0)


Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    per_sequence: int = 1
    """Consecutive ranks that share sequences: they hold the same rows."""

    layout: Layout | None = None
    """How Megatron divides the ranks, if it does: those of a data rank hold the same rows."""

    @classmethod
    def here(cls, per_sequence: int = 1, megatron: McoreEngineConfig | None = None) -> "Ranks":
        """Rank and size of the joined process group; (0, 1) without one."""
        if not is_distributed():
            return cls()
        size = dist.get_world_size()
        layout = None if megatron is None else Layout.of(megatron, size)
        return cls(dist.get_rank(), size, per_sequence, layout)

    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's sequences; every rank must ask."""
        if self.per_sequence == 1:
            return None
        size = self.per_sequence
        starts = range(0, self.size, size)
        groups = [dist.new_group(list(range(first, first + size))) for first in starts]
        own = groups[self.rank // size]
        assert isinstance(own, dist.ProcessGroup)
        return own

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_shares(self) -> int:
        """Ranks, or groups of them, with rows of their own."""
        return self.size // self.per_sequence if self.layout is None else self.layout.data

    def share(self, rows: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of `rows`."""
        if self.layout is not None:
            return rows[self.layout.data_rank(self.rank) :: self.num_shares]
        return rows[self.rank // self.per_sequence :: self.num_shares]

    def total(self, *values: float) -> list[float]:
        """Values of rows, summed over all rows; every rank must ask. Counts stay exact to 2^53."""
        num_copies = self.size // self.num_shares
        return [value / num_copies for value in self.sum(*values)]

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks; every rank must ask."""
        return all_reduce_(torch.tensor(values, dtype=torch.float64)).tolist()

    def agree(self, value: bool) -> bool:
        """Whether any rank says so."""
        return self.sum(value)[0] > 0

    def hear_first(self, text: str = "") -> str:
        """What the first rank says; every rank must ask."""
        own = text.encode() if self.is_first else b""
        length = int(self.sum(len(own))[0])
        codes = self.sum(*(own if self.is_first else bytes(length))) if length else []
        return bytes(map(int, codes)).decode()

    def meet(self) -> None:
        """Go on when every rank is here, within the time limit of the process group."""
        self.sum(0)
