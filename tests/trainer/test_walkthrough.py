"""The tour from a prompt to a gradient names places that exist, and stays short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOPS = re.findall(r"`([\w/.-]+\.py)::([\w.]+)`", (ROOT / "docs" / "walkthrough.md").read_text())


def definition(file: str, symbol: str) -> ast.AST | None:
    node = ast.parse((ROOT / file).read_text())
    for name in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [child for child in node.body if isinstance(child, kinds) and child.name == name]
        if not found:
            return None
        node = found[0]
    return node


@pytest.mark.parametrize(("file", "symbol"), HOPS, ids=[symbol for _, symbol in HOPS])
def test_every_hop_exists(file, symbol):
    assert definition(file, symbol) is not None


def test_the_way_is_short():
    num_lines = sum(
        node.end_lineno - node.lineno + 1 for hop in HOPS if (node := definition(*hop)) is not None
    )
    assert len(HOPS) <= 26
    assert len({file for file, _ in HOPS}) <= 18
    assert num_lines <= 600
