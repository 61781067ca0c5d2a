"""Dividing numbers into parts of nearly equal sum. Plain Python: no tensors, no ranks.

`karmarkar_karp` is the largest-differencing method (Karmarkar and Karp 1982): keep a heap of
partial divisions, always join the two with the widest spread, the heavy parts of one with the light
parts of the other. `greedy_partition` gives each number, largest first, to the lightest part.
`best_fit_decreasing` has a ceiling on the sums instead of a number of parts. All return the indices
of the numbers, one list per part; every part holds at least one.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from typing import Any

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
    """Places (in heavy, in light) whose swap moves closest to half the gap; both are ascending."""
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
    room: list[tuple[int, int]] = []  # (free, which), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[i], -1))
        if place == len(room):
            parts.append([])
            free, k = capacity, len(parts) - 1
        else:
            free, k = room.pop(place)
        parts[k].append(i)
        insort(room, (free - lengths[i], k))
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
