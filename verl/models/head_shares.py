"""Which attention heads belong to which rank, where ranks divide the heads of a layer.

Query heads are dealt out evenly, in order. Key heads go with the queries that use them; where there
are fewer of them than ranks, or they do not come out even, several ranks hold the same one.
"""

from math import gcd


def heads_per_rank(num_heads: int, num_ranks: int, option: str) -> int:
    """Query heads of one rank; `option` is the setting that asks for so many ranks."""
    if num_heads % num_ranks:
        choices = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"{option} ({num_ranks}) must divide the {num_heads} attention heads of the model, "
            f"which it deals out to ranks; possible are {choices}"
        )
    return num_heads // num_ranks


def key_head_repeats(num_key_heads: int, num_ranks: int) -> int:
    """How often each key head is repeated, side by side, so that all ranks get equally many.

    Queries still meet their own keys: the heads of one rank are consecutive before and after.
    """
    return num_ranks // gcd(num_key_heads, num_ranks)


def key_heads_of_rank(num_key_heads: int, num_ranks: int, rank: int) -> list[int]:
    """The key heads, repeats included, that one rank's queries use."""
    repeats = key_head_repeats(num_key_heads, num_ranks)
    per_rank = num_key_heads * repeats // num_ranks
    return [head // repeats for head in range(rank * per_rank, (rank + 1) * per_rank)]
