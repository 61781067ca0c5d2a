"""Which options the package reads, found in its source.

A read is an attribute (`rollout.n`), a subscript (`section["n"]`) or `get("n")`. Its owner is what
stands before it: the name, the section it was assigned from, or the class it is annotated with.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "verl"
OWN = (PACKAGE / "config", PACKAGE / "trainer" / "config")
MAKERS = {PACKAGE / "config" / "async_plan.py"}
"""Modules of the schema's own folder that make something else out of options."""


@cache
def reads() -> dict[str, set[str]]:
    """Each name that is read, with the owners it is read from."""
    found: dict[str, set[str]] = defaultdict(set)
    paths = [
        path for path in sorted(PACKAGE.rglob("*.py")) if path.parent not in OWN or path in MAKERS
    ]
    trees = [ast.parse(path.read_text()) for path in paths]
    attributes: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for name, classes in declared_attributes(tree):
            attributes[name] |= classes
    for tree in trees:
        for name, owners in reads_of(tree, attributes):
            found[name] |= owners
    return found


def declared_attributes(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """The fields of classes, which other modules read as `spec.engine.seed`."""
    for node in ast.walk(tree):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign):
                yield last_name(item.target), words(item.annotation)


def words(annotation: ast.expr) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(annotation)))


def reads_of(tree: ast.Module, attributes: dict[str, set[str]]) -> Iterator[tuple[str, set[str]]]:
    aliases = aliases_of(tree)
    for name, classes in attributes.items():
        aliases[name] |= classes
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = last_name(node.value)
            yield node.attr, {owner, *aliases[owner]}
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = last_name(node.value)
            yield str(node.slice.value), {owner, *aliases[owner]}
        elif isinstance(node, ast.Call) and last_name(node.func) == "get" and node.args:
            if isinstance(node.func, ast.Attribute) and isinstance(node.args[0], ast.Constant):
                owner = last_name(node.func.value)
                yield str(node.args[0].value), {owner, *aliases[owner]}
        elif isinstance(node, ast.Tuple):  # names that a loop reads one by one
            for one in node.elts:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value, {"*"}


def aliases_of(tree: ast.Module) -> dict[str, set[str]]:
    """Variables, by the attributes they are assigned from and the classes they are said to be."""
    aliases: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in pairs(target, node.value):
                    aliases[name] |= {last_name(one) for one in alternatives(value)}
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else last_name(node.target)
            aliases[name] |= words(node.annotation)
        elif isinstance(node, ast.Call):  # an argument carries its name into the function
            for keyword in node.keywords:
                if keyword.arg is not None:
                    aliases[keyword.arg] |= {last_name(keyword.value)}
    for name in list(aliases):  # a variable that is assigned from a variable
        aliases[name] |= {
            further for one in list(aliases[name]) for further in aliases.get(one, ())
        }
    return aliases


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from pairs(one, other)
    else:
        yield last_name(target), value


def alternatives(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""
