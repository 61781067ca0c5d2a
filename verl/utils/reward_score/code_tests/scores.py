"""From the verdicts on the cases to the score of the program."""

from collections.abc import Iterable

from verl.utils.reward_score.code_tests.verdicts import Verdict

CONTINUOUS_CASES = 10
"""A continuous score looks at this many cases."""


def score_of(verdicts: Iterable[Verdict], *, continuous: bool) -> float:
    """The fraction of cases passed, or 1 only if all are. Reads no further than it must."""
    if continuous:
        passed = [verdict is True for verdict in verdicts]
        return sum(passed) / len(passed)
    return float(all(verdict is True for verdict in verdicts))
