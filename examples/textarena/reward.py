"""What earns a reward: to find the number, the sooner the better.

The environment has scored each turn (`turn_scores`); it gives 1 for the turn that finds the number.
"""

from typing import Any

MAX_GUESSES = 6
PER_GUESS = 0.08


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    **kwargs: Any,
) -> dict[str, float]:
    """1 for the first guess, 0.08 less for each further one, 0 if it is not found."""
    turns = extra_info["turn_scores"]
    has_won = bool(turns) and turns[-1] == 1.0
    num_guesses = len(turns) if has_won else MAX_GUESSES
    score = 1.0 - PER_GUESS * (num_guesses - 1) if has_won else 0.0
    return {"score": score, "win": float(has_won), "guesses": float(num_guesses)}
