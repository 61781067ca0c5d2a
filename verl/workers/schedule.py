"""The schedule of a batch: which rows each rank computes, in which optimizer step and pass.

    batch      rows 0 .. n-1
    order      rank 0: rows 0 2 5 7 | rank 1: rows 1 3 4 6      equal contiguous chunks
    step 0     rank 0: [0 1] [2]    | rank 1: [0] [1 2]         passes, by index in the chunk
    step 1     rank 0: [3]          | rank 1: []                equally many; the last is empty

The controller decides for all ranks, so that every rank runs equally many passes and no collective
hangs. A pass is the forward and backward call over one micro-batch. The rows of an optimizer step
follow from the batch alone; they are dispatched to ranks so that token counts balance. The counts
that a loss divides by are those of the step, over all ranks. A short chunk is padded by repeating
a row; a padding row is in no pass and has no influence. Plans are plain numbers: `to_dict` gives
what travels in `DataProto.meta_info`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from verl.utils.seqlen_balancing import best_fit_decreasing

Passes = list[list[int]]
"""The rows of each micro-batch, as indices into a rank's chunk; a micro-batch may be empty."""


@dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """The size of a micro-batch, in rows or in tokens; exactly one of the two is set."""

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(
                f"micro-batches are split by rows ({self.rows}) or tokens ({self.tokens}); set one"
            )

    @classmethod
    def of(
        cls, *, by_tokens: bool, tokens: int, rows: int | None, ranks_per_sequence: int = 1
    ) -> "MicroBatching":
        """Build from the three options of a role. `tokens` is the budget of one device; ranks that
        split sequences run a micro-batch together, so their budgets add up."""
        return cls(tokens=tokens * ranks_per_sequence) if by_tokens else cls(rows=rows)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The rank and index of each row: chunk r of `order`, one of equal chunks, goes to rank r."""

    order: list[int]
    """The row at each index."""

    padding: list[int]
    """Indices that repeat a row to make the chunks equal; they are in no pass."""

    num_ranks: int

    @property
    def indices(self) -> list[int]:
        """The index of each row: a column in `order` is restored by `column[indices]`."""
        padding = set(self.padding)
        index_of = {row: i for i, row in enumerate(self.order) if i not in padding}
        return [index_of[row] for row in range(len(index_of))]

    def rows_of(self, rank: int) -> list[int]:
        """The rows of the batch that a rank holds, padding included."""
        size = len(self.order) // self.num_ranks
        return self.order[rank * size : (rank + 1) * size]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class InferencePlan(Placement):
    """Forward passes without gradients over every row update."""

    passes: list[Passes]
    """The micro-batches of each rank."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InferencePlan":
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: the counts that losses divide by, and the micro-batches of each rank."""

    batch_num_tokens: int
    """Response tokens of the step, over all ranks."""

    global_batch_size: int
    """Sessions of the step with at least one response token, over all ranks."""

    passes: list[Passes]
    """The micro-batches of each rank."""

    component_tokens: dict[str, int] = field(default_factory=dict)
    """Of each further component of the loss, the tokens of the step that have a weight in it."""

    def rows_of(self, rank: int) -> list[int]:
        """All rows of a rank in this step, ascending, as indices into its chunk."""
        return sorted(row for rows in self.passes[rank] for row in rows)


@dataclass(frozen=True, kw_only=True)
class UpdatePlan(Placement):
    """The optimizer steps of one update, in order."""

    steps: list[StepPlan]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "UpdatePlan":
        steps = [StepPlan(**step) for step in values["steps"]]
        return cls(**{**values, "steps": steps})


def plan_update(
    lengths: Sequence[int],
    response_tokens: Sequence[int],
    *,
    rows_per_step: int,
    micro_batching: MicroBatching,
    num_ranks: int = 1,
    epochs: int = 1,
    shuffle_seed: int | None = None,
    groups: Sequence[int] | None = None,
    sessions: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    components: Mapping[str, Sequence[int]] | None = None,
) -> UpdatePlan:
    """Plan `epochs` epochs over all rows, `rows_per_step` (over all ranks) per optimizer step.

    The last step of an epoch may be short: a filter upstream may have dropped rows, and dropping
    more to make the numbers even would bias what is learnt. `lengths` counts all tokens of a row,
    `response_tokens` those in the loss. Rows with the same label in `groups` go to one rank and,
    where they fit, into one micro-batch. With a seed every epoch is shuffled anew; rows keep the
    rank of the first epoch, so later steps may be less balanced.

    Rows with the same label in `sessions` are one sequence: a step has `rows_per_step` sessions,
    with all of their rows, on whatever ranks, and its losses are divided by its sessions. With
    `units` a step has `rows_per_step` units instead: rows with the same label stay in one step.
    `components` has, for each further component of the loss, the tokens of every row that count.
    """
    sizes, responses = np.asarray(lengths), np.asarray(response_tokens)
    labels = np.arange(len(sizes)) if groups is None else np.asarray(groups)
    if not len(sizes) == len(responses) == len(labels) > 0:
        raise ValueError(
            f"{len(sizes)} lengths, {len(responses)} response lengths and {len(labels)} groups; "
            "there must be equally many, and at least one row"
        )
    if micro_batching.tokens is not None:
        check_budget(lengths, micro_batching.tokens)
    session_of = np.arange(len(sizes)) if sessions is None else by_first_appearance(sessions)
    unit_of = session_of if units is None else by_first_appearance(units)
    epoch_steps = [
        [np.flatnonzero(np.isin(unit_of, chosen)) for chosen in epoch]
        for epoch in epoch_rows(int(unit_of.max()) + 1, rows_per_step, epochs, shuffle_seed)
    ]
    rank_of = assign_ranks(epoch_steps[0], sizes, labels, num_ranks)
    order, padding, index = chunk_rows(rank_of, sizes, num_ranks)
    steps = []
    for rows in (rows for epoch in epoch_steps for rows in epoch):
        passes = split_for_ranks(rows, rank_of, index, sizes, labels, num_ranks, micro_batching)
        steps.append(
            StepPlan(
                batch_num_tokens=int(responses[rows].sum()),
                global_batch_size=len(np.unique(session_of[rows[responses[rows] > 0]])),
                passes=passes,
                component_tokens={
                    name: int(np.asarray(tokens)[rows].sum())
                    for name, tokens in (components or {}).items()
                },
            )
        )
    return UpdatePlan(order=order, padding=padding, num_ranks=num_ranks, steps=steps)


def plan_inference(
    lengths: Sequence[int],
    *,
    micro_batching: MicroBatching,
    num_ranks: int = 1,
    groups: Sequence[int] | None = None,
) -> InferencePlan:
    """Plan forward passes over every row once, equally many on every rank."""
    update = plan_update(
        lengths,
        lengths,
        rows_per_step=max(1, len(lengths)),
        micro_batching=micro_batching,
        num_ranks=num_ranks,
        groups=groups,
    )
    return InferencePlan(
        order=update.order,
        padding=update.padding,
        num_ranks=num_ranks,
        passes=update.steps[0].passes,
    )


def split_micro_batches(
    lengths: Sequence[int], micro_batching: MicroBatching, groups: Sequence[int] | None = None
) -> Passes:
    """Split rows into the micro-batches of one rank, as indices into `lengths`."""
    if micro_batching.rows is not None:
        return split_by_count(len(lengths), micro_batching.rows)
    assert micro_batching.tokens is not None
    return pack_by_tokens(lengths, micro_batching.tokens, groups)


def split_by_count(num_rows: int, rows_per_pass: int) -> Passes:
    """Split consecutive rows, `rows_per_pass` at a time; the last micro-batch may be short."""
    rows = range(num_rows)
    return [list(rows[i : i + rows_per_pass]) for i in range(0, num_rows, rows_per_pass)]


def pack_by_tokens(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None = None
) -> Passes:
    """Pack rows into few micro-batches of at most `max_tokens`, the largest first.

    The rows of a group that fits stay together.
    """
    check_budget(lengths, max_tokens)
    units = [[row] for row in range(len(lengths))]
    if groups is not None:
        units = list(packing_units(lengths, max_tokens, groups))
    totals = [sum(lengths[row] for row in unit) for unit in units]
    parts = best_fit_decreasing(totals, max_tokens)
    parts.sort(key=lambda part: -sum(totals[unit] for unit in part))
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def check_budget(lengths: Sequence[int], max_tokens: int) -> None:
    too_long = [i for i, n in enumerate(lengths) if n > max_tokens]
    if too_long:
        raise ValueError(
            f"row {too_long[0]} has {lengths[too_long[0]]} tokens, more than the budget of "
            f"{max_tokens} tokens per micro-batch; raise the budget (ppo_max_token_len_per_gpu) "
            f"to at least {max(lengths)}"
        )


# ---- parts of a plan -----------------------------------------------------------------------------


def by_first_appearance(labels: Sequence[int]) -> np.ndarray:
    """Labels as numbers, counted up as new ones appear."""
    _, first, number = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def epoch_rows(
    num_rows: int, rows_per_step: int, epochs: int, shuffle_seed: int | None
) -> Iterator[list[np.ndarray]]:
    """For each epoch, the rows (or units) of its optimizer steps; those of a step ascend."""
    generator = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
    borders = range(rows_per_step, num_rows, rows_per_step)
    for _ in range(epochs):
        rows = np.arange(num_rows) if generator is None else generator.permutation(num_rows)
        yield [np.sort(part) for part in np.split(rows, borders)]


def assign_ranks(
    steps: Sequence[np.ndarray], lengths: np.ndarray, labels: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Assign each row a rank: equally many groups of every step, and nearly equally many tokens.

    Groups are assigned in rounds, longest first; in each round the rank with the fewest tokens gets
    the longest. An incomplete round starts at the rank where the previous one ended, so that
    chunks stay equal.
    """
    rank_of = np.zeros(len(lengths), dtype=np.int64)
    num_assigned = 0
    for rows in steps if num_ranks > 1 else ():
        _, unit_of_row = np.unique(labels[rows], return_inverse=True)
        totals = np.bincount(unit_of_row, weights=lengths[rows])
        rank_of_unit = np.zeros(len(totals), dtype=np.int64)
        loads = np.zeros(num_ranks)
        longest_first = np.argsort(-totals, kind="stable")
        for start in range(0, len(totals), num_ranks):
            units = longest_first[start : start + num_ranks]
            ranks = (num_assigned + np.arange(len(units))) % num_ranks
            ranks = ranks[np.argsort(loads[ranks], kind="stable")]
            rank_of_unit[units] = ranks
            loads[ranks] += totals[units]
            num_assigned += len(units)
        rank_of[rows] = rank_of_unit[unit_of_row]
    return rank_of


def chunk_rows(
    rank_of: np.ndarray, lengths: np.ndarray, num_ranks: int
) -> tuple[list[int], list[int], np.ndarray]:
    """(row at each index, indices of padding, index of each row in its rank's chunk)."""
    chunks = [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]
    size = max(map(len, chunks))
    shortest = int(lengths.argmin())
    order, padding = [], []
    index = np.zeros(len(rank_of), dtype=np.int64)
    for rank, rows in enumerate(chunks):
        index[rows] = np.arange(len(rows))
        order += rows.tolist() + [shortest] * (size - len(rows))
        padding += range(rank * size + len(rows), (rank + 1) * size)
    return order, padding, index


def split_for_ranks(
    rows: np.ndarray,
    rank_of: np.ndarray,
    index: np.ndarray,
    lengths: np.ndarray,
    labels: np.ndarray,
    num_ranks: int,
    micro_batching: MicroBatching,
) -> list[Passes]:
    """The micro-batches of every rank in one step, padded with empty ones to equal counts."""
    passes_of = []
    for rank in range(num_ranks):
        rank_rows = rows[rank_of[rows] == rank]
        passes = split_micro_batches(
            lengths[rank_rows].tolist(), micro_batching, labels[rank_rows].tolist()
        )
        passes_of.append([index[rank_rows[part]].tolist() for part in passes])
    most = max(map(len, passes_of))
    return [passes + [[] for _ in range(most - len(passes))] for passes in passes_of]


def packing_units(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int]
) -> Iterator[list[int]]:
    """Groups as units for packing; a group larger than `max_tokens` is split."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    for rows in members.values():
        parts = [list(range(len(rows)))]
        if sum(lengths[row] for row in rows) > max_tokens:
            parts = best_fit_decreasing([lengths[row] for row in rows], max_tokens)
        for part in parts:
            yield [rows[i] for i in part]
