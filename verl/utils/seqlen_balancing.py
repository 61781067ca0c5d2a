"""Sequences of different lengths, balanced over ranks and over micro-batches.

Two questions: which sequences go to which rank, so that all ranks have the same work, and which go
into one forward pass, so that it holds at most `max_token_len` tokens. A micro-batch never exceeds
that budget, and all ranks of a group have equally many, so none waits for the others forever.

The arithmetic is plain Python on lengths. `karmarkar_karp` is the largest-differencing method
(Karmarkar and Karp 1982): keep a heap of partial partitions, always join the two with the widest
spread, heavy parts of one with light parts of the other. `greedy_partition` gives each number,
largest first, to the lightest part. `best_fit_decreasing` bounds the sums instead of fixing the
number of parts. All return indices, one non-empty list per part.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, count, pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.utils.distributed import Group, all_reduce_, is_distributed
from verl.utils.tensor_rows import is_nested, open_jagged, take_jagged
from verl.utils.tensordict_utils import index_select_tensor_dict

Parts = list[list[int]]
Selectable = TypeVar("Selectable", bound="RowBatch")


class RowBatch(Protocol):
    """What `prepare_dynamic_batch` needs of a DataProto."""

    batch: TensorDict

    def select_idxs(self: Selectable, idxs: list[int]) -> Selectable: ...


# ---- over ranks ----------------------------------------------------------------------------------


def calculate_workload(seqlen_list: Tensor | Sequence[int]) -> Tensor:
    """Relative cost of a sequence: 6 h s for the linear layers plus s^2 for attention, h = 4096.

    A layer costs 24 h^2 s + 4 h s^2 operations; divided by 4 h. The hidden size is that of a 7B
    model; only the shape of the curve matters.
    """
    lengths = torch.as_tensor(seqlen_list, dtype=torch.int64)
    return 24576 * lengths + lengths**2


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> Parts:
    """Indices in `k_partitions` parts of nearly equal sum, each in ascending order.

    The better of `karmarkar_karp` and `greedy_partition`. Both may do badly when the parts must be
    of equal size and a few sequences are very long; swaps then even them out.
    """
    seqlen_list = [int(length) for length in seqlen_list]
    candidates = (
        divide(seqlen_list, k_partitions, equal_size)
        for divide in (karmarkar_karp, greedy_partition)
    )
    best = min(candidates, key=lambda parts: max(_sums(seqlen_list, parts)))
    if equal_size:
        best = even_out_by_swaps(seqlen_list, best)
    return [sorted(part) for part in best]


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> Parts:
    """Balance whole groups: sequences with the same uid stay together, in order.

    Groups are weighed by their workload. Where the number of groups permits it, every part gets
    equally many, so that groups of one size give parts of one size.
    """
    if len(seqlen_list) != len(uid_list):
        raise ValueError(
            f"{len(seqlen_list)} lengths and {len(uid_list)} uids must be equally many"
        )
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, uid in enumerate(uid_list):
        members[uid].append(row)
    if len(members) < k_partitions:
        raise ValueError(
            f"{len(members)} groups cannot be divided into {k_partitions} parts without tearing one"
        )
    groups = list(members.values())
    weights = _sums(calculate_workload(seqlen_list).tolist(), groups)
    parts = get_seqlen_balanced_partitions(
        weights, k_partitions, equal_size=len(groups) % k_partitions == 0
    )
    return [list(chain.from_iterable(groups[g] for g in part)) for part in parts]


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Parts, prefix: str
) -> dict[str, float]:
    """Tokens per part before (rows in their order, as equal as it goes) and after balancing."""
    k = len(partitions)
    borders = [len(seqlen_list) * i // k for i in range(k + 1)]
    before = [sum(seqlen_list[a:b]) for a, b in pairwise(borders)]
    after = _sums(seqlen_list, partitions)
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / k,
    }


# ---- over micro-batches --------------------------------------------------------------------------


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Group = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[TensorDict], Parts]:
    """Cut a batch into micro-batches of at most `max_token_len` tokens; (parts, rows of each).

    Lengths come from jagged `input_ids`, else from `attention_mask`. There are as few as fit, but
    at least `min_num_micro_batch`, rounded up to a multiple of `num_batches_divided_by`. With
    `same_micro_num_in_dp` all ranks of `dp_group` (default: of the job) use the largest number any
    of them needs, and all refuse together if one of them cannot. `use_dynamic_bsz_balance` evens
    out the estimated work rather than tokens and puts the heaviest in the middle, since pipelines
    run short of work at both ends.
    """
    lengths = _sequence_lengths(batch)
    longest = max(lengths, default=0)
    feasible = _fewest(lengths, max_token_len) if 0 < longest <= max_token_len else []
    needed = max(len(feasible), min_num_micro_batch or 1)
    group = dp_group if same_micro_num_in_dp else _ALONE
    most, fewest_rows, longest = _agree(needed, len(lengths), longest, group)
    if longest > max_token_len:
        raise ValueError(_too_long(lengths, longest, max_token_len))
    num_micro = roundup_divisible(most, num_batches_divided_by or 1)
    if num_micro > fewest_rows:
        raise ValueError(
            f"{num_micro} micro-batches are needed and a rank has only {fewest_rows} sequences; "
            f"every micro-batch needs one (min_num_micro_batch={min_num_micro_batch}, "
            f"num_batches_divided_by={num_batches_divided_by}, max_token_len={max_token_len})"
        )
    weights = calculate_workload(lengths).tolist() if use_dynamic_bsz_balance else lengths
    parts = _balanced_within(lengths, weights, max_token_len, num_micro, feasible)
    if use_dynamic_bsz_balance:
        parts = _heaviest_in_the_middle(weights, parts)
    return [index_select_tensor_dict(batch, part) for part in parts], parts


def prepare_dynamic_batch(
    data: Selectable,
    max_token_len: int,
    dp_group: Group = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Selectable], Parts]:
    """`rearrange_micro_batches` for a DataProto: its other columns follow their rows."""
    _, parts = rearrange_micro_batches(
        data.batch.select(*_LENGTH_KEYS, strict=False),
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in parts], parts


def restore_dynamic_batch(data: Tensor, batch_idx_list: Parts) -> Tensor:
    """Put joined micro-batch results (a row per sequence, jagged or not) back in batch order."""
    order = list(chain.from_iterable(batch_idx_list))
    if len(order) != data.shape[0]:
        raise ValueError(f"{data.shape[0]} rows do not match {len(order)} indices of micro-batches")
    index = torch.tensor(get_reverse_idx(order), device=data.device)
    return take_jagged(data, index, {}) if is_nested(data) else data[index]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse permutation: `result[idx_map[i]] == i`."""
    reverse = [0] * len(idx_map)
    for i, index in enumerate(idx_map):
        reverse[index] = i
    return reverse


def ceildiv(a: int, b: int) -> int:
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of `b` that is at least `a`."""
    return ceildiv(a, b) * b


# ---- how -----------------------------------------------------------------------------------------

_LENGTH_KEYS = ("input_ids", "attention_mask")


class _Alone:
    """Stands for: agree with nobody."""


_ALONE = _Alone()


def _sequence_lengths(batch: TensorDict) -> list[int]:
    if "input_ids" in batch and is_nested(batch["input_ids"]):
        return open_jagged(batch["input_ids"]).row_lengths.tolist()
    return batch["attention_mask"].sum(-1).long().tolist()


def _agree(needed: int, num_rows: int, longest: int, group: Group | _Alone) -> tuple[int, int, int]:
    """The largest need, the fewest rows and the longest sequence over the ranks of `group`."""
    if isinstance(group, _Alone) or not is_distributed():
        return needed, num_rows, longest
    extremes = torch.tensor([needed, -num_rows, longest])
    most, fewest, longest = all_reduce_(extremes, dist.ReduceOp.MAX, group).tolist()
    return most, -fewest, longest


def _too_long(lengths: list[int], longest: int, max_token_len: int) -> str:
    where = (
        f"sequence {lengths.index(longest)}" if longest in lengths else "a sequence of another rank"
    )
    return (
        f"{where} has {longest} tokens, and no micro-batch may hold more than max_token_len "
        f"{max_token_len}; raise the token budget to at least the longest prompt plus response"
    )


def _fewest(lengths: list[int], max_token_len: int) -> Parts:
    """As few parts within the budget as two good tries find."""
    fewest = max(1, ceildiv(sum(lengths), max_token_len))
    even = get_seqlen_balanced_partitions(lengths, fewest, equal_size=False)
    if max(_sums(lengths, even)) <= max_token_len:
        return even
    return best_fit_decreasing(lengths, max_token_len)


def _balanced_within(
    lengths: list[int], weights: list[int], max_token_len: int, num_parts: int, feasible: Parts
) -> Parts:
    """Even in weight if the budget permits, else even in tokens, else what is known to fit."""
    for measure in (weights, lengths):
        parts = get_seqlen_balanced_partitions(measure, num_parts, equal_size=False)
        if max(_sums(lengths, parts)) <= max_token_len:
            return parts
    return _split(lengths, feasible, num_parts)


def _split(lengths: list[int], parts: Parts, num_parts: int) -> Parts:
    """Halve the heaviest part that has two sequences until there are `num_parts`."""
    heap = [(-sum(lengths[i] for i in part), part) for part in parts if len(part) > 1]
    done = [part for part in parts if len(part) == 1]
    heapq.heapify(heap)
    while len(heap) + len(done) < num_parts:
        _, part = heapq.heappop(heap)
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in half), half))
            else:
                done.append(half)
    return [sorted(part) for part in [*(part for _, part in heap), *done]]


def _heaviest_in_the_middle(weights: list[int], parts: Parts) -> Parts:
    falling = sorted(parts, key=lambda part: -sum(weights[i] for i in part))
    return falling[::2][::-1] + falling[1::2]


def _sums(values: Sequence[int], parts: Parts) -> list[int]:
    return [sum(values[i] for i in part) for part in parts]


Part = tuple[int, Any]
"""The sum of a part and its members: an index, or a pair of member trees (joining is then free)."""


def karmarkar_karp(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Parts of nearly equal sum; with `equal_size` they also have equally many numbers."""
    check_partition(len(seqlen_list), k_partitions, equal_size)
    singles: list[Part] = sorted((seqlen_list[i], i) for i in range(len(seqlen_list)))
    # Joining adds sizes part by part: divisions of one number per part give parts of equal size.
    step = k_partitions if equal_size else 1
    divisions = [singles[i : i + step][::-1] for i in range(0, len(singles), step)]
    serial = count()
    heap = [(-_spread(parts, k_partitions), next(serial), parts) for parts in divisions]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, wider = heapq.heappop(heap)
        joined = _join(wider, heap[0][2], k_partitions)
        heapq.heapreplace(heap, (-_spread(joined, k_partitions), next(serial), joined))
    return [_indices(members) for _, members in heap[0][2]]


def _spread(parts: list[Part], k_partitions: int) -> int:
    """Heaviest minus lightest; parts come heaviest first, and empty ones are not listed."""
    return parts[0][0] - (parts[-1][0] if len(parts) == k_partitions else 0)


def _join(left: list[Part], right: list[Part], k_partitions: int) -> list[Part]:
    """The heaviest of one meets the lightest (or an empty part) of the other."""
    first_shared = max(0, k_partitions - len(right))
    shared = [
        (left[i][0] + right[k_partitions - 1 - i][0], (left[i][1], right[k_partitions - 1 - i][1]))
        for i in range(first_shared, len(left))
    ]
    joined = left[:first_shared] + shared + right[: k_partitions - len(left)]
    joined.sort(key=lambda part: part[0], reverse=True)
    return joined


def _indices(members: Any) -> list[int]:
    indices: list[int] = []
    waiting = [members]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend(item)
        else:
            indices.append(item)
    return indices


def greedy_partition(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Largest first, each to the part with the smallest sum that still has room."""
    check_partition(len(seqlen_list), k_partitions, equal_size)
    capacity = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    open_parts = [(0, 0, k) for k in range(k_partitions)]  # (sum, how many, which)
    for i in sorted(range(len(seqlen_list)), key=lambda i: -seqlen_list[i]):
        total, size, k = heapq.heappop(open_parts)
        parts[k].append(i)
        if size + 1 < capacity:
            heapq.heappush(open_parts, (total + seqlen_list[i], size + 1, k))
    return parts


def even_out_by_swaps(lengths: Sequence[int], parts: list[list[int]]) -> list[list[int]]:
    """Swap single members of the heaviest and the lightest part while that narrows their gap.

    Sizes do not change. Each swap lowers the heaviest sum or the number of parts that have it; ten
    rounds per part are enough in practice, and bound the time.
    """
    parts = [sorted(part, key=lambda i: lengths[i]) for part in parts]
    totals = [sum(lengths[i] for i in part) for part in parts]
    for _ in range(10 * len(parts)):
        heavy, light = totals.index(max(totals)), totals.index(min(totals))
        pair = _best_swap(lengths, parts[heavy], parts[light], totals[heavy] - totals[light])
        if pair is None:
            break
        give, take = parts[heavy].pop(pair[0]), parts[light].pop(pair[1])
        insort(parts[heavy], take, key=lambda i: lengths[i])
        insort(parts[light], give, key=lambda i: lengths[i])
        totals[heavy] += lengths[take] - lengths[give]
        totals[light] += lengths[give] - lengths[take]
    return parts


def _best_swap(
    lengths: Sequence[int], heavy: list[int], light: list[int], gap: int
) -> tuple[int, int] | None:
    """Indices (in heavy, in light) whose swap moves closest to half the gap; both are ascending."""
    rising = [lengths[i] for i in light]
    best, best_miss = None, gap / 2  # moving nothing misses half the gap by that much
    for place, i in enumerate(heavy):
        near = bisect_left(rising, lengths[i] - gap / 2)
        for other in (near - 1, near):
            if 0 <= other < len(light):
                miss = abs(lengths[i] - rising[other] - gap / 2)
                if miss < best_miss:
                    best, best_miss = (place, other), miss
    return best


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Few parts, none with a sum above `capacity`; each number must fit by itself.

    Largest first, each into the fullest part where it fits: at most 11/9 of the least possible
    number of parts plus a constant (Johnson et al. 1974).
    """
    parts: list[list[int]] = []
    spare: list[tuple[int, int]] = []  # (free, part), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = bisect_left(spare, (lengths[i], -1))
        if index == len(spare):
            parts.append([])
            free, k = capacity, len(parts) - 1
        else:
            free, k = spare.pop(index)
        parts[k].append(i)
        insort(spare, (free - lengths[i], k))
    return parts


def check_partition(num_items: int, k_partitions: int, equal_size: bool) -> None:
    if not 1 <= k_partitions <= num_items:
        raise ValueError(
            f"{num_items} sequences cannot be divided into {k_partitions} parts; "
            "every part needs at least one"
        )
    if equal_size and num_items % k_partitions:
        raise ValueError(
            f"{num_items} sequences cannot be divided into {k_partitions} parts of equal size; "
            f"{k_partitions} must divide {num_items}"
        )
