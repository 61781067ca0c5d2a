"""Random numbers that depend on what they are for, not on what was drawn before them.

A seed is a hash of its purpose: the run's seed, the step, the prompt, the sample. So two runs draw
the same, a run that was stopped continues as if it had not been, and a sample's tokens do not
depend on which others are generated with it.
"""

import hashlib
import random

import numpy as np
import torch

DEFAULT_SEED = 1


def keyed_seed(*key: int | str) -> int:
    """63 bits that belong to `key` alone."""
    text = "\x1f".join(map(repr, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Set the generators that algorithms and users' code draw from: torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
