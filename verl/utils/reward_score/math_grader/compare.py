"""Whether two answers say the same: form against form, then number against number.

Trees are first rewritten to one form for one meaning: 1 +- 2 becomes two answers, 1 < x <= 3 an
interval, "no solution" the empty set, and a name in front of a value (x = 5) is taken off where the
other side has none. Points, intervals and matrices agree entry by entry; sets and bare lists in any
order; equations when one is a multiple of the other. A unit, a percent or a degree sign, or a base
that only one side writes does not count against it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from verl.utils.reward_score.math_grader.equality import Equality
from verl.utils.reward_score.math_grader.lexer import ALL_REALS as ALL_REALS_WORDS
from verl.utils.reward_score.math_grader.lexer import NO_SOLUTION, is_known
from verl.utils.reward_score.math_grader.nodes import (
    Call,
    Constant,
    Degree,
    Either,
    Group,
    Items,
    Listing,
    Matrix,
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
    Union,
    Unsupported,
    Words,
    symbols,
    walk,
)

_FORMS = (Listing, SetOf, Union, Group, Matrix, Relation, Words)
INFINITY = Constant("infinity")
ALL_REALS = Group("(", (Negate(INFINITY), INFINITY), ")")


def plain_words(text: str) -> str:
    """Words without case, punctuation and articles."""
    words = re.sub(r"[^\w\s]", " ", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _meaning(words: str) -> Node | None:
    if words in NO_SOLUTION:
        return SetOf(())
    return ALL_REALS if words in ALL_REALS_WORDS else None


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


class Comparison:
    def __init__(self, equality: Equality) -> None:
        self._equality = equality

    def same(self, gold: Node, answer: Node) -> bool:
        self._equality.work.spend(2)
        if gold == answer:
            return True
        rounded = rounded_value(gold)
        if rounded is not None:
            return self._is_close(rounded, without_name(answer, is_gold=False))
        if self._is_false(answer):
            return False
        gold, answer = without_domain(gold), without_domain(answer)
        gold_values, answer_values = assignments(gold), assignments(answer)
        if gold_values and answer_values:
            return gold_values.keys() == answer_values.keys() and all(
                self.same(value, answer_values[name]) for name, value in gold_values.items()
            )
        if answer_values and isinstance(gold, Group) and sorted(answer_values) == [*answer_values]:
            return self._same_in_order(gold.items, [*answer_values.values()])
        if not (isinstance(gold, Relation) and isinstance(answer, Relation)):
            gold = without_name(gold, is_gold=True)
            answer = without_name(answer, is_gold=False)
        elif len(gold.operators) == len(answer.operators) == 1 and gold.operators[0] in _MIRROR:
            return self._same_relation(gold, answer)  # 2x > 4 is x > 2
        names = [{name for name, _ in roots(node)} for node in (gold, answer)]
        if all(names) and names[0] != names[1]:
            return False
        return self._same_form(rewritten(gold), rewritten(answer))

    def _is_false(self, node: Node) -> bool:
        """Whether an equation says of two different numbers that they are equal, as 3 = 5."""
        if not isinstance(node, Relation) or set(node.operators) != {"="}:
            return False
        numbers = [
            member
            for member in node.members
            if not isinstance(member, (*_FORMS, Quantity)) and not symbols(member)
        ]
        return not all(self.same(numbers[0], number) for number in numbers[1:])

    def _same_form(self, gold: Node, answer: Node) -> bool:
        match gold, answer:
            case (Quantity(), _) | (_, Quantity()):
                return self._same_quantity(gold, answer)
            case (Listing(), Listing()):
                return self._same_lists(gold.items, answer.items)
            case (SetOf() | Listing(), SetOf() | Listing()):
                return self._same_sets(gold.items, answer.items)
            case (Union(), Union()):
                return self._same_sets(gold.items, answer.items)
            case (Group(), Group()):
                brackets = (gold.opening, gold.closing) == (answer.opening, answer.closing)
                return brackets and self._same_in_order(gold.items, answer.items)
            case (Matrix(), Matrix()):
                shapes = [(len(node.rows), len(node.rows[0])) for node in (gold, answer)]
                return shapes[0] == shapes[1] and self._same_in_order(
                    gold.children(), answer.children()
                )
            case (Relation(), Relation()):
                return self._same_relation(first_and_last(gold), first_and_last(answer))
            case (Words(), Words()):
                return plain_words(gold.text) == plain_words(answer.text)
        if isinstance(gold, _FORMS) or isinstance(answer, _FORMS):
            return self._refuse_or_differ(gold, answer)
        return self._same_number(gold, answer)

    def _refuse_or_differ(self, gold: Node, answer: Node) -> bool:
        """Forms of different kinds differ, except a list of inequalities, which may be a union,
        and what matrices are computed from."""
        for one, other in ((gold, answer), (answer, gold)):
            if isinstance(one, Matrix) and any(isinstance(part, Matrix) for part in walk(other)):
                raise Unsupported("sums and products of matrices")
            has_relations = any(isinstance(item, Relation) for item in one.children())
            if isinstance(one, Listing) and isinstance(other, Union | Group) and has_relations:
                raise Unsupported("inequalities joined by words against an interval")
        return False

    # ---- several things

    def _same_in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(
            self.same(one, other) for one, other in zip(gold, answer, strict=True)
        )

    def _same_lists(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        if len(gold) != len(answer):
            return False
        counts = _counted(gold), _counted(answer)
        if counts[0] is not None and counts[1] is not None:
            return counts[0] == counts[1]
        unmatched = list(answer)
        for item in gold:
            match = next((k for k, other in enumerate(unmatched) if self.same(item, other)), None)
            if match is None:
                return False
            del unmatched[match]
        return True

    def _same_sets(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        counts = _counted(gold), _counted(answer)
        if counts[0] is not None and counts[1] is not None:
            return counts[0].keys() == counts[1].keys()
        return all(any(self.same(one, other) for other in answer) for one in gold) and all(
            any(self.same(one, other) for one in gold) for other in answer
        )

    # ---- one thing

    def _same_quantity(self, gold: Node, answer: Node) -> bool:
        gold_value, gold_unit = _quantity(gold)
        answer_value, answer_unit = _quantity(answer)
        if not self.same(gold_value, answer_value):
            return False
        if gold_unit == answer_unit or not gold_unit or not answer_unit:
            return True
        if is_known(gold_unit) and is_known(answer_unit):
            return False
        raise Unsupported(f"whether {answer_unit!r} is another name for {gold_unit!r}")

    def _same_relation(self, gold: Relation, answer: Relation) -> bool:
        gold, answer = _pointing_left(gold), _pointing_left(answer)
        if gold.operators != answer.operators:
            return False
        members = (*gold.members, *answer.members)
        is_constant = not any(map(symbols, members))
        if len(gold.operators) > 1 or is_constant or any(isinstance(m, _FORMS) for m in members):
            return self._same_in_order(gold.members, answer.members)
        is_directed = set(gold.operators) <= {"<", "<="}
        return self._equality.is_proportional(
            _difference(gold), _difference(answer), same_sign=is_directed
        )

    def _same_number(self, gold: Node, answer: Node) -> bool:
        if _infinite_sign(gold) or _infinite_sign(answer):
            return _infinite_sign(gold) == _infinite_sign(answer)
        if _base(gold) or _base(answer):
            return self._same_in_base(gold, answer)
        if self._equality.holds(gold, answer):
            return True
        return any(
            isinstance(gold, mark) != isinstance(answer, mark)
            and self._equality.holds(_unmarked(gold, mark), _unmarked(answer, mark))
            for mark in (Percent, Degree)
        )

    def _same_in_base(self, gold: Node, answer: Node) -> bool:
        """The gold answer's base must be kept; it may be left unwritten."""
        if not isinstance(gold, Number) or not isinstance(answer, Number):
            return not _base(gold) and self._equality.holds(gold, answer)
        is_same_text = gold.digits.lstrip("0") == answer.digits.lstrip("0") and gold.digits != ""
        if gold.base is None:
            return gold.value == answer.value
        return answer.base in (gold.base, None) and is_same_text

    def _is_close(self, gold: Number, answer: Node) -> bool:
        if isinstance(answer, _FORMS) or symbols(answer):
            return False
        answer = answer.value if isinstance(answer, Quantity) else answer
        return self._equality.is_within(gold, answer, Fraction(1, 2 * 10**gold.decimals))


def _counted(items: Sequence[Node]) -> Counter[Fraction] | None:
    """How often each number occurs; None where something is not a plain number."""
    values = [item.value for item in items if isinstance(item, Number) and item.base is None]
    return Counter(values) if len(values) == len(items) else None


def _quantity(node: Node) -> tuple[Node, str]:
    match node:
        case Quantity(value=value, unit=unit):
            return value, unit
        case Product(factors=(Number() as value, Symbol(name=name))) if is_known(name):
            return value, name  # 5 m, where the other side has a unit
        case _:
            return node, ""


def _unmarked(node: Node, mark: type[Unary]) -> Node:
    return node.operand if isinstance(node, mark) else node


def _base(node: Node) -> int | None:
    return node.base if isinstance(node, Number) else None


def _infinite_sign(node: Node) -> int:
    if isinstance(node, Negate):
        return -_infinite_sign(node.operand)
    return int(node == Constant("infinity"))


def _pointing_left(node: Relation) -> Relation:
    """a > b is b < a."""
    if set(node.operators) <= {">", ">="}:
        turned = tuple({">": "<", ">=": "<="}[operator] for operator in reversed(node.operators))
        return Relation(node.members[::-1], turned)
    return node


def _difference(node: Relation) -> Node:
    return Sum((node.members[0], Negate(node.members[1])))


_BELOW = {"<": "(", "<=": "["}
_ABOVE = {">": ")", ">=": "]"}
_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _has_two_signs(node: Node) -> bool:
    return any(isinstance(part, PlusMinus | MinusPlus) for part in walk(node))


def rewritten(node: Node) -> Node:
    """The form in which answers are compared."""
    if _has_two_signs(node):
        if isinstance(node, SetOf | Listing):  # each item stands for two, or for itself
            items = [rewritten(i).children() if _has_two_signs(i) else (i,) for i in node.items]
            return type(node)(tuple(item for both in items for item in both))
        return Listing((_with_sign(node, is_plus=True), _with_sign(node, is_plus=False)))
    match node:
        case Relation():
            return _interval(node) or node
        case Either(items=items):
            intervals = [_interval(item) for item in items if isinstance(item, Relation)]
            pieces = tuple(interval for interval in intervals if interval is not None)
            return Union(pieces) if len(pieces) == len(items) else without_indices(node)
        case Listing():
            return without_indices(node)
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


def without_domain(node: Node) -> Node:
    """A for x in A, as for an inequality; and what is exact in a relation that also rounds it."""
    match node:
        case Relation(members=(name, domain), operators=("in",)) if _is_name(name):
            return domain
        case Relation(operators=operators) if "~=" in operators:
            return without_name(node, is_gold=True)
        case _:
            return node


def assignments(node: Node) -> dict[str, Node] | None:
    """The values by name in x = 1, y = 2 and in (x, y) = (1, 2); None for anything else."""
    match node:
        case Relation(members=(Group(items=names), Group(items=values)), operators=("=",)):
            pairs = [*zip(names, values, strict=False)] if len(names) == len(values) else []
        case Listing(items=items):
            pairs = [
                item.members
                for item in items
                if isinstance(item, Relation) and item.operators == ("=",)
            ]
            pairs = pairs if len(pairs) == len(items) else []
        case _:
            return None
    named = {name.name: value for name, value in pairs if isinstance(name, Symbol)}
    is_complete = len(named) == len(pairs) > 1
    return named if is_complete and not any(map(_ROOT_NAME.fullmatch, named)) else None


def roots(node: Node) -> list[tuple[str, Node]]:
    """The names and values of x_1 = 2, x_2 = 3; empty for anything else."""
    items = node.items if isinstance(node, Listing) else ()
    found = [
        (item.members[0].name, item.members[1])
        for item in items
        if isinstance(item, Relation)
        and item.operators == ("=",)
        and isinstance(item.members[0], Symbol)
        and _ROOT_NAME.fullmatch(item.members[0].name)
    ]
    return found if len(found) == len(items) else []


def without_indices(node: Listing) -> Node:
    """2 and 3 for x_1 = 2, x_2 = 3: the roots of an equation have no order."""
    return Listing(tuple(value for _, value in roots(node))) if roots(node) else node


_ROOT_NAME = re.compile(r"[xyzt]_[0-9]")


def first_and_last(node: Relation) -> Relation:
    """a = b = c says what a = c says."""
    if set(node.operators) == {"="}:
        return Relation((node.members[0], node.members[-1]), ("=",))
    return node
