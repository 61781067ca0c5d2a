"""SECURITY.md claims nothing that no test shows, and knows every file that opens a socket."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
TEST_ID = r"`(tests/[\w/]+\.py)::(\w+)`"
OPENS_A_SOCKET = re.compile(
    r"create_server\(|\.bind\(\(|HTTPServer\b|uvicorn\.Config\(|TCPStore\(|start_server\("
    r"|JsonServer\("
)


def test_every_test_that_is_named_exists():
    named = re.findall(TEST_ID, TEXT)
    assert len(named) > 30
    assert not [one for one in named if one[1] not in functions_of(one[0])]
    assert TEXT.count("tests/") == len(named) + 1  # and this file: all in the form that is read


def test_every_port_has_a_proof_or_is_not_ours():
    section = TEXT.partition("## Ports")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 8
    assert not [row[1] for row in rows if not re.search(TEST_ID + "|not ours", row[5])]


def test_every_file_that_opens_a_socket_is_in_the_table():
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "verl").rglob("*.py")
        if OPENS_A_SOCKET.search(path.read_text())
    }
    assert len(files) > 4
    assert not [name for name in sorted(files) if f"`{name}`" not in TEXT]


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}
