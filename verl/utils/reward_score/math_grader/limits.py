"""How much work one grade may cost, and the ways in which reading or computing can end early.

Text from a model may ask for anything: power towers, a million digits, brackets without end. Every
size is limited before work starts, and what remains is counted in units of about ten microseconds,
not in seconds, so that the verdict is the same on every machine, in every thread and process.
"""

MAX_CHARACTERS = 2000
"""A longer answer is not read. Also keeps every literal below Python's limit for integers."""

MAX_TOKENS = 600
MAX_DEPTH = 24
"""Brackets in brackets. The parser is recursive and must not exhaust the interpreter's stack."""

MAX_BITS = 8192
"""Exact numbers beyond this size are carried on as intervals."""

MAX_WORK = 3000


class GradingStopped(Exception):
    """Why one side could not be read or computed. The subclasses say what follows from it."""


class Malformed(GradingStopped):
    """The text is not mathematics: unbalanced brackets, an operator without operand."""


class Unsupported(GradingStopped):
    """The text may well be mathematics, but not of the kind that this grader knows."""


class TooLarge(GradingStopped):
    """Reading or computing it would pass a limit."""


class Undefined(GradingStopped):
    """The expression has no value there: a division by zero, the logarithm of a negative number."""


class Undecided(GradingStopped):
    """The digits computed so far do not tell on which side of zero a number lies."""


class Work:
    """Counts what a grade has cost so far."""

    def __init__(self, allowance: int = MAX_WORK) -> None:
        self.left = allowance

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TooLarge("the comparison takes more work than is allowed")
