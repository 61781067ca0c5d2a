"""Numbers that look random and depend on their input alone.

A generator's state depends on everything drawn before; a hash does not. What is drawn from a hash
of (seed, place) is the same whatever else runs, in whatever order, and again after a resume.
"""

import hashlib
from typing import TypeVar

import numpy as np
from torch import Tensor

Integers = TypeVar("Integers", Tensor, np.ndarray)
"""Of 64 bits; products wrap around."""

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""An odd constant that spreads counters over all 64 bits."""


def scramble(x: Integers) -> Integers:
    """SplitMix64's finalizer on int64: each input bit changes each output bit half of the time."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, counter), in fp64; both int64 of one shape.

    They have 52 bits: their product with any sum is below the sum, also after rounding.
    """
    bits = scramble(scramble(seeds + GOLDEN) + counters * GOLDEN)
    return _shift_right(bits, 12).double() * 2.0**-52


def _shift_right(x: Integers, places: int) -> Integers:
    """Shift as if unsigned; torch and numpy keep the sign."""
    return (x >> places) & (2 ** (64 - places) - 1)


def keyed_seed(*key: int | str) -> int:
    """63 bits that belong to `key` alone."""
    text = "\x1f".join(map(repr, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
