"""What the grader can say about an answer.

`Wrong` means the answer was shown not to be the gold answer (or is not mathematics at all).
`Abstain` means that nothing was shown: the text lies outside the grammar or the work outside the
limits. A reward function reports it as None, which takes the response out of training.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Correct:
    """The answer is the gold answer, perhaps written differently."""


@dataclass(frozen=True)
class Wrong:
    """The answer is something else; `reason` says how that was seen."""

    reason: str


@dataclass(frozen=True)
class Abstain:
    """The grader cannot tell; `reason` says what it could not read or work out."""

    reason: str


Verdict = Correct | Wrong | Abstain
