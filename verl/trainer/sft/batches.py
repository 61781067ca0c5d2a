"""Which rows each step trains on, and how they are laid out for the engine.

The order of an epoch is a function of the seed and the epoch alone, so a resumed run goes on with
the same rows. A row becomes [padding, context, trained part, padding], like a prompt and its
response in reinforcement learning, so both use the same engine; nothing is predicted before the
first token that is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from verl.utils.dataset.sft_dataset import SFTDataset, trained_tokens

Row = dict[str, Tensor]


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
    dataset: Dataset[Row], indices: Sequence[int], batch_size: int
) -> Iterator[Callable[[], TensorDict]]:
    """Each gives a batch of these rows, from the first to the last, which may be short."""
    for start in range(0, len(indices), batch_size):
        yield partial(load_rows, dataset, indices[start : start + batch_size])


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
    for i, (part, context, length) in enumerate(zip(parts, contexts, lengths, strict=True)):
        place = slice(P - context, P - context + length)
        columns["attention_mask"][i, place] = 1
        for name, values in part.items():
            columns[name][i, place] = values
    response_mask = columns.pop("loss_mask")[:, P:]
    columns |= {"responses": columns["input_ids"][:, P:], "response_mask": response_mask}
    return TensorDict(columns, batch_size=B)


def real_tokens(row: Row) -> Row:
    """The columns of a row without its padding; the first token can never be predicted.

    A row without `attention_mask` has no padding.
    """
    is_real = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
    part = {name: row[name][is_real] for name in ("input_ids", "position_ids", "loss_mask")}
    part["loss_mask"] = part["loss_mask"].clone()
    part["loss_mask"][:1] = 0
    return part


def first_trained(loss_mask: Tensor) -> int:
    """Tokens before the first trained one; all of them when none is."""
    trained = loss_mask.nonzero()
    return int(trained[0]) if len(trained) else len(loss_mask)
