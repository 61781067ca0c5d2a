"""The task: count on. After `4` comes `5 6 7 8`, after `8` comes `9 0 1 2`.

Replace this file to train on something else; it knows nothing of models.
"""

import random

GO, END = 10, 11  # digits are the tokens 0 to 9
VOCABULARY = 12
NUM_ANSWERS = 4


def sample_prompts(num_prompts: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(10), GO] for _ in range(num_prompts)]


def score(prompt: list[int], response: list[int]) -> float:
    """The share of the answer that is right."""
    right = [(prompt[0] + step) % 10 for step in range(1, NUM_ANSWERS + 1)]
    return sum(a == b for a, b in zip(right, response, strict=False)) / NUM_ANSWERS
