"""The sentence below each field, read from the source of the schema.

Python throws away a string that stands below an assignment; the parser still sees it. A subclass
that gives a field another default may leave the sentence to its base class.
"""

import ast
import inspect
import sys
from functools import cache

from verl.config.base import BaseConfig


@cache
def sentences(cls: type[BaseConfig]) -> dict[str, str]:
    """The documentation of every field of a section, inherited ones included."""
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if issubclass(ancestor, BaseConfig) and ancestor is not BaseConfig:
            found |= _classes(ancestor.__module__)[ancestor.__name__]
    return found


def summary(cls: type[BaseConfig]) -> str:
    """What a section is for: the docstring of its class."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split())


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for item, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[item.target.id] = " ".join(below.value.value.split())
    return found
