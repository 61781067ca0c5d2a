"""One form for one meaning: rewriting a tree before it is compared.

1 +- 2 becomes two answers, 1 < x <= 3 an interval, "no solution" the empty set, and a name in front
of a value (x = 5) is taken off where the other side has none.
"""

import re

from verl.utils.reward_score.math_grader import vocabulary
from verl.utils.reward_score.math_grader.nodes import (
    Call,
    Constant,
    Degree,
    Group,
    Items,
    Listing,
    MinusPlus,
    Negate,
    Node,
    Number,
    Percent,
    PlusMinus,
    Power,
    Product,
    Quantity,
    Relation,
    SetOf,
    Sum,
    Symbol,
    Unary,
    Words,
    symbols,
    walk,
)

_BELOW = {"<": "(", "<=": "["}
_ABOVE = {">": ")", ">=": "]"}
_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
INFINITY = Constant("infinity")
ALL_REALS = Group("(", (Negate(INFINITY), INFINITY), ")")


def rewritten(node: Node) -> Node:
    """The form in which answers are compared."""
    if any(isinstance(part, PlusMinus | MinusPlus) for part in walk(node)):
        return Listing((_with_sign(node, is_plus=True), _with_sign(node, is_plus=False)))
    match node:
        case Relation():
            return _interval(node) or node
        case Negate(operand=Degree() | Percent() as inner):
            return type(inner)(Negate(inner.operand))
        case Negate(operand=Quantity(value=value, unit=unit)):
            return Quantity(Negate(value), unit)
        case Words(text=text):
            return _meaning(plain_words(text)) or node
        case Symbol(name="\\mathbb{R}"):
            return ALL_REALS
        case _:
            return node


def plain_words(text: str) -> str:
    """Words without case, punctuation and articles."""
    words = re.sub(r"[^\w\s]", " ", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _meaning(words: str) -> Node | None:
    if words in vocabulary.NO_SOLUTION:
        return SetOf(())
    return ALL_REALS if words in vocabulary.ALL_REALS else None


# ---- relations -----------------------------------------------------------------------------------


def rounded_value(node: Node) -> Number | None:
    """The decimal in "x is about 3.14": an answer that asks for as many digits as it shows."""
    match node:
        case Relation(members=(Words() | Symbol(), Number() as value), operators=("~=",)):
            return value
        case _:
            return None


def without_name(node: Node, *, is_gold: bool) -> Node:
    """What a relation says: 5 for x = 5, for 5 = x and for 2 + 3 = 5, A for x in A.

    A relation that gives no value, such as x + y = z, stays as it is; so does x + y = 5 as the gold
    answer, for there it may be what was asked for.
    """
    if not isinstance(node, Relation):
        return node
    members, operators = node.members, node.operators
    if "~=" in operators:
        split = operators.index("~=") + 1
        exact = Relation(members[:split], operators[: split - 1]) if split > 1 else members[0]
        if _is_name(members[split - 1]):
            return members[split]
        return without_name(exact, is_gold=is_gold)
    if operators == ("in",) and _is_name(members[0]):
        return members[1]
    if set(operators) != {"="}:
        return node
    if _is_name(members[-1]) and not symbols(members[0]):
        return members[0]
    asked = node if is_gold else members[-1]
    return members[-1] if _is_name(members[0]) or not symbols(asked) else node


def first_and_last(node: Relation) -> Relation:
    """a = b = c says what a = c says."""
    if set(node.operators) == {"="}:
        return Relation((node.members[0], node.members[-1]), ("=",))
    return node


def _is_name(node: Node) -> bool:
    """x, f(x), a word, nothing, or a point of symbols."""
    match node:
        case Symbol() | Words():
            return True
        case Product(factors=(Symbol(), *rest)):
            return all(isinstance(factor, Symbol | Number) for factor in rest)
        case Group(items=items):
            return all(isinstance(item, Symbol) for item in items)
        case _:
            return False


def _interval(node: Relation) -> Node | None:
    """The interval that an inequality for one symbol describes."""
    members, operators = node.members, node.operators
    if len(members) == 2 and isinstance(members[1], Symbol) and operators[0] in _MIRROR:
        return _interval(Relation(members[::-1], (_MIRROR[operators[0]],)))
    match members:
        case (Symbol(), bound) if not symbols(bound):
            if operators[0] in _ABOVE:
                return Group("(" if operators[0] == ">" else "[", (bound, INFINITY), ")")
            if operators[0] in _BELOW:
                return Group("(", (Negate(INFINITY), bound), ")" if operators[0] == "<" else "]")
        case (left, Symbol(), right) if not symbols(left) | symbols(right):
            if all(operator in _BELOW for operator in operators):
                closing = ")" if operators[1] == "<" else "]"
                return Group(_BELOW[operators[0]], (left, right), closing)
            if all(operator in _ABOVE for operator in operators):
                opening = "(" if operators[1] == ">" else "["
                return Group(opening, (right, left), _ABOVE[operators[0]])
    return None


# ---- both signs ----------------------------------------------------------------------------------


def _with_sign(node: Node, *, is_plus: bool) -> Node:
    """The tree with one of the two signs everywhere."""

    def again(part: Node) -> Node:
        return _with_sign(part, is_plus=is_plus)

    match node:
        case PlusMinus(operand=operand):
            return again(operand) if is_plus else Negate(again(operand))
        case MinusPlus(operand=operand):
            return Negate(again(operand)) if is_plus else again(operand)
        case Sum() | Product() | Items():
            return type(node)(tuple(again(part) for part in node.children()))
        case Unary(operand=operand):
            return type(node)(again(operand))
        case Power(base=base, exponent=exponent):
            return Power(again(base), again(exponent))
        case Call(function=function, arguments=arguments):
            return Call(function, tuple(again(part) for part in arguments))
        case Group(opening=opening, items=items, closing=closing):
            return Group(opening, tuple(again(part) for part in items), closing)
        case Relation(members=members, operators=operators):
            return Relation(tuple(again(part) for part in members), operators)
        case Quantity(value=value, unit=unit):
            return Quantity(again(value), unit)
        case _:
            return node
