"""What earns a reward: to find the number, the sooner the better.

The guesses are read from the model's own calls and compared with the number: what the model writes
about winning counts for nothing.
"""

import re
from typing import Any

CALL = re.compile(r'"name": "guess", "arguments": \{"n": (-?\d{1,6})\}')
MAX_GUESSES = 6
PER_GUESS = 0.08


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """1 for the first guess, 0.08 less for each further one, 0 if it is not found."""
    guesses = [int(n) for n in CALL.findall(solution_str)[:MAX_GUESSES]]
    target = int(ground_truth)
    has_won = target in guesses
    num_guesses = guesses.index(target) + 1 if has_won else MAX_GUESSES
    score = 1.0 - PER_GUESS * (num_guesses - 1) if has_won else 0.0
    return {"score": score, "win": float(has_won), "guesses": float(num_guesses)}
