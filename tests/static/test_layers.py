"""Imports point down the list in layers.txt, lazy imports included, and never in a circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    found = []
    for path in sorted((ROOT / "verl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((name, path, ast.parse(path.read_text())))
    return found


def layer_of(module: str, ranks: dict[str, int]) -> int | None:
    while module:
        # The root package stands for itself alone: a module in no listed folder has no layer.
        if module in ranks:
            return ranks[module]
        module = module.rpartition(".")[0]
        if module == "verl":
            return None
    return None


def layers() -> dict[str, int]:
    lines = (
        line.partition("#")[0].split() for line in (ROOT / "layers.txt").read_text().splitlines()
    )
    order = [prefixes for prefixes in lines if prefixes]
    return {prefix: height for height, prefixes in enumerate(order) for prefix in prefixes}


def imported_modules(
    tree: ast.Module, known: set[str], package: list[str]
) -> Iterator[tuple[str, int]]:
    typing_only = {
        id(child)
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target:
                yield target, node.lineno


@cache
def graph() -> dict[str, set[tuple[str, int]]]:
    found = list(modules())
    known = {name for name, _, _ in found}
    edges = {}
    for name, path, tree in found:
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        edges[name] = {
            (target, line)
            for target, line in imported_modules(tree, known, package)
            if target != name
        }
    return edges


def test_imports_point_down_the_layer_list():
    ranks = layers()
    upward, homeless = [], []
    for name, targets in graph().items():
        here = layer_of(name, ranks)
        if here is None:
            homeless.append(name)
            continue
        for target, line in targets:
            there = layer_of(target, ranks)
            if there is not None and there > here:
                upward.append(f"{name}:{line} imports {target}")
    assert not upward
    assert not homeless, "these modules are in no layer of layers.txt"


def test_no_modules_import_each_other_in_a_circle():
    edges = {name: {target for target, _ in targets} for name, targets in graph().items()}
    TopologicalSorter(edges).prepare()


def test_facades_only_re_export_and_stay_short():
    facades = (ROOT / "layers.txt").read_text().strip().splitlines()[-1].split()
    for name, path, tree in modules():
        if layer_of(name, dict.fromkeys(facades, 0)) is None:
            continue
        code = [
            node
            for node in tree.body
            if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))
        ]
        definitions = [
            n
            for n in code
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name != "__getattr__"
        ]
        assert not definitions, f"{path} is a facade and must define nothing"


ENGINES = {
    "ray": ("verl.single_controller.ray", "verl.data_plane.on_ray"),
    "vllm": "verl.workers.rollout.vllm_rollout",
    "sglang": "verl.workers.rollout.sglang_rollout",
    "megatron": "verl.workers.engine.megatron",
}
"""Where each is at home; what the rest of the package imports of such a folder does not need it."""


def test_importing_a_module_never_imports_an_engine_outside_its_own_folder():
    offenders = []
    for name, _, tree in modules():
        for node in tree.body:  # module level only: a function may import what it needs
            targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                targets = [node.module or ""]
            engines = {target.split(".")[0] for target in targets} & ENGINES.keys()
            offenders += [
                f"{name} imports {engine}"
                for engine in engines
                if not name.startswith(ENGINES[engine])
            ]
    assert not offenders
