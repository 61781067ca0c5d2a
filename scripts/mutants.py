"""Small faults in the package: what `scripts/mutate.py` plants.

A mutant is one change to the syntax tree of one line: a comparison turned round, a condition
negated, a number one off, an operator or two arguments swapped, a statement left out, nothing
returned. Messages, log lines, docstrings, assertions and annotations are not mutated: nobody tests
them. Lines are drawn by seed; equal seeds on equal trees draw equal mutants.
"""

import ast
import copy
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    "verl/algos",
    "verl/workers/engine",
    "verl/workers/rollout/native",
    "verl/utils/checkpoint",
    "verl/workers/reward_manager",
    "verl/utils/reward_score",
)
NEGATED = dict(
    [(ast.Lt, ast.GtE), (ast.GtE, ast.Lt), (ast.Gt, ast.LtE), (ast.LtE, ast.Gt)]
    + [(ast.Eq, ast.NotEq), (ast.NotEq, ast.Eq), (ast.Is, ast.IsNot), (ast.IsNot, ast.Is)]
    + [(ast.In, ast.NotIn), (ast.NotIn, ast.In)]
)
AT_THE_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OTHER_OPERATOR = dict(
    [(ast.Add, ast.Sub), (ast.Sub, ast.Add), (ast.Mult, ast.Div), (ast.Div, ast.Mult)]
    + [(ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult), (ast.Pow, ast.Mult)]
    + [(ast.BitAnd, ast.BitOr), (ast.BitOr, ast.BitAnd)]
)
SPEECH = {"debug", "info", "warning", "error", "exception", "log", "print", "warn", "note"}
SYMMETRIC = {
    *("max", "min", "isinstance", "issubclass", "equal", "allclose", "isclose", "option"),
    *("add", "multiply"),
}
LARGEST_COUNT = 16  # greater numbers are sizes of buffers and limits


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    kind: str
    source: str = field(repr=False)

    def diff(self) -> str:
        before = (ROOT / self.path).read_text().splitlines()
        lines = difflib.unified_diff(before, self.source.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    sites: dict[tuple[str, int], list[Site]] = defaultdict(list)
    for target in TARGETS:
        for path in sorted((ROOT / target).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for site in sites_of(name, path.read_text()) if only in name else ():
                sites[name, site.line].append(site)
    chance = random.Random(seed)
    lines = sorted(sites)
    chance.shuffle(lines)
    return [chance.choice(sites[line]).mutant() for line in lines[:count]]


@dataclass(frozen=True)
class Site:
    """A part of a file, in bytes, and what would stand there instead."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    code: str

    def mutant(self) -> Mutant:
        text = (ROOT / self.path).read_bytes()
        source = (text[: self.start] + self.code.encode() + text[self.end :]).decode()
        ast.parse(source)
        return Mutant(self.path, self.line, self.kind, source)


def sites_of(name: str, source: str) -> Iterator[Site]:
    start_of_line = [0]
    for line in source.encode().splitlines(keepends=True):
        start_of_line.append(start_of_line[-1] + len(line))
    for node in mutable_nodes(ast.parse(source)):
        start = start_of_line[node.lineno - 1] + node.col_offset
        end = start_of_line[node.end_lineno - 1] + node.end_col_offset
        for kind, changed in changes(node):
            code = ast.unparse(changed)
            if isinstance(changed, ast.expr) and not isinstance(changed, ast.Constant):
                code = f"({code})"
            yield Site(name, node.lineno, kind, start, end, code)


def mutable_nodes(node: ast.AST) -> Iterator[Any]:
    """Nodes in reading order, without what nobody tests."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        if isinstance(node, ast.Raise):
            yield node
        return
    if isinstance(node, ast.Call) and called_name(node) in SPEECH:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Expr) and is_speech(node):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "logger"):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # of zip: an assertion
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from mutable_nodes(child)


def is_speech(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Call) and called_name(node.value) in SPEECH


def called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def changes(node: Any) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.expr):
        yield from changed_expressions(node)
    elif isinstance(node, ast.If | ast.While):
        return  # their tests are expressions of their own
    elif is_removable(node):
        yield "statement left out", ast.Pass()
    elif isinstance(node, ast.Return) and not is_nothing(node.value):
        yield "nothing returned", ast.Return(ast.Constant(None))


def changed_expressions(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        operator = type(node.ops[0])
        for table, kind in ((NEGATED, "comparison turned"), (AT_THE_BOUNDARY, "boundary moved")):
            if operator in table:
                yield kind, replaced(node, ops=[table[operator](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "and / or", replaced(node, op=other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        if not isinstance(node.operand, ast.Constant):  # -1 is the last of two dimensions
            yield "negation dropped", node.operand
    elif isinstance(node, ast.IfExp):
        yield "condition negated", replaced(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER_OPERATOR and not is_text(node):
        yield "operator swapped", replaced(node, op=OTHER_OPERATOR[type(node.op)]())
    elif isinstance(node, ast.Call) and can_swap(node):
        first, second, *rest = node.args
        yield "arguments swapped", replaced(node, args=[second, first, *rest])
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "flag turned", ast.Constant(not node.value)
        elif isinstance(node.value, int) and abs(node.value) <= LARGEST_COUNT:
            yield "one more", ast.Constant(node.value + 1)


def replaced(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def is_removable(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Raise)


def is_nothing(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and not value.value)


def is_text(node: ast.BinOp) -> bool:
    """Joined strings, and unions of types where they are values."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant)]
    return any(isinstance(p, ast.JoinedStr) or isinstance(p.value, str | None) for p in parts)


def can_swap(node: ast.Call) -> bool:
    if len(node.args) < 2 or called_name(node) in SYMMETRIC:
        return False
    first, second = node.args[:2]
    return not isinstance(first, ast.Starred) and ast.dump(first) != ast.dump(second)
