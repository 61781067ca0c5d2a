"""Which rows go through the model together. A choice of memory, never of mathematics.

Rows are cut by count or by a token budget. The controller makes the schedule for every rank, so
that all ranks make the same number of passes; a rank without rows makes an empty pass.
"""

from collections.abc import Sequence

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def cut_by_count(num_rows: int, rows_per_batch: int) -> list[list[int]]:
    """Consecutive rows, `rows_per_batch` at a time; the last may be short."""
    rows = range(num_rows)
    return [list(rows[i : i + rows_per_batch]) for i in range(0, num_rows, rows_per_batch)]


def cut_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups of similar total length, each within `max_tokens`, as few as possible."""
    too_long = [i for i, n in enumerate(lengths) if n > max_tokens]
    if too_long:
        raise ValueError(
            f"row {too_long[0]} has {lengths[too_long[0]]} tokens, more than the budget of "
            f"{max_tokens} tokens per micro-batch; raise the budget (ppo_max_token_len_per_gpu) "
            f"to at least {max(lengths)}"
        )
    num_batches = max(1, -(-sum(lengths) // max_tokens)) if lengths else 0
    while num_batches:
        parts = get_seqlen_balanced_partitions(list(lengths), num_batches, equal_size=False)
        if max(sum(lengths[i] for i in part) for part in parts) <= max_tokens:
            return parts
        num_batches += 1
    return []
