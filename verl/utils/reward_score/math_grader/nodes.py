"""The syntax tree of an answer, and how much work one grade may cost.

Expressions stand for one number (given values for their symbols); the other nodes are the forms
that answers come in. Nodes are plain values: equal text gives equal trees.

Text from a model may ask for anything: power towers, a million digits, brackets without end. Every
size is limited before work starts, and what remains is counted in units of about ten microseconds,
not in seconds, so that the verdict is the same on every machine, in every thread and process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Node:
    """Base of all nodes; `children` are the nodes directly inside."""

    def children(self) -> "tuple[Node, ...]":
        return ()


# ---- expressions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal. `digits` and `base` are set for one like 1011_2, `decimals` for one like 3.14."""

    value: Fraction
    decimals: int = 0
    digits: str = ""
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """`pi`, `e`, `i` or `infinity`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol(Node):
    """A variable, with whatever index or accent belongs to its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Sum(Node):
    terms: tuple[Node, ...]

    def children(self) -> tuple[Node, ...]:
        return self.terms


@dataclass(frozen=True, slots=True)
class Product(Node):
    factors: tuple[Node, ...]

    def children(self) -> tuple[Node, ...]:
        return self.factors


@dataclass(frozen=True, slots=True)
class Unary(Node):
    """One operand inside."""

    operand: Node

    def children(self) -> tuple[Node, ...]:
        return (self.operand,)


class Negate(Unary):
    __slots__ = ()


class Inverse(Unary):
    """One divided by the operand."""

    __slots__ = ()


class Percent(Unary):
    __slots__ = ()


class Degree(Unary):
    """An angle in degrees."""

    __slots__ = ()


class PlusMinus(Unary):
    """Both the operand and its negative."""

    __slots__ = ()


class MinusPlus(Unary):
    """Like `PlusMinus`, with the other sign of the two."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Power(Node):
    base: Node
    exponent: Node

    def children(self) -> tuple[Node, ...]:
        return (self.base, self.exponent)


@dataclass(frozen=True, slots=True)
class Call(Node):
    """A function of `evaluate.FUNCTIONS` applied to its arguments."""

    function: str
    arguments: tuple[Node, ...]

    def children(self) -> tuple[Node, ...]:
        return self.arguments


# ---- forms of answers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Items(Node):
    """Several things side by side."""

    items: tuple[Node, ...]

    def children(self) -> tuple[Node, ...]:
        return self.items


class Listing(Items):
    """Separated by commas or words, without brackets: the order does not matter."""

    __slots__ = ()


class Either(Listing):
    """A listing joined by commas or "or": between inequalities it is a union."""

    __slots__ = ()


class SetOf(Items):
    """In braces: neither order nor repetition matters."""

    __slots__ = ()


class Union(Items):
    """Pieces joined by a cup."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Group(Node):
    """In brackets, in order: a point, a vector or an interval; the brackets tell which."""

    opening: str
    items: tuple[Node, ...]
    closing: str

    def children(self) -> tuple[Node, ...]:
        return self.items


@dataclass(frozen=True, slots=True)
class Matrix(Node):
    rows: tuple[tuple[Node, ...], ...]

    def children(self) -> tuple[Node, ...]:
        return tuple(cell for row in self.rows for cell in row)


@dataclass(frozen=True, slots=True)
class Relation(Node):
    """A chain such as 1 < x <= 3: `operators` stand between the members."""

    members: tuple[Node, ...]
    operators: tuple[str, ...]

    def children(self) -> tuple[Node, ...]:
        return self.members


@dataclass(frozen=True, slots=True)
class Quantity(Node):
    """A value with a unit."""

    value: Node
    unit: str

    def children(self) -> tuple[Node, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Words(Node):
    """An answer in words."""

    text: str


def walk(node: Node) -> Iterator[Node]:
    """The node and everything inside it."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(current.children())


def symbols(node: Node) -> set[str]:
    return {part.name for part in walk(node) if isinstance(part, Symbol)}


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


class UnknownCommand(Unsupported):
    """It is written with a LaTeX command that is not in the grammar, as an integral or a sum is."""

    def __init__(self, command: str) -> None:
        super().__init__(f"the command \\{command} is not known")
        self.command = command


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
