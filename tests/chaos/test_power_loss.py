"""A power loss at any moment: what was synced is there, of the rest anything may be or not.

A process saves steps while the shim records what it does to the disk. From the record the disk is
built anew as it may be found after a cut: names and bytes that were synced, and of the others none,
the names alone, or any that the dice choose. Whatever was acknowledged before the cut must load.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.chaos.shim import environment, recorded, require_shim
from tests.utils.checkpoint.saver import contents
from verl.utils.checkpoint.layout import NoIntactCheckpointError
from verl.utils.checkpoint.store import find_intact
from verl.utils.checkpoint.tensor_store import load_state

REPOSITORY = Path(__file__).parents[2]
SAVES = ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1))
"""Step and version; a step that is saved again replaces itself."""

SAVER = """
import os, sys
from pathlib import Path
from tests.utils.checkpoint.saver import save
from verl.utils.checkpoint.store import CheckpointStore

folder = Path(sys.argv[1])
store = CheckpointStore(folder / "root", fingerprint={}, num_to_keep=2)
acknowledged = os.open(folder / "acknowledged", os.O_CREAT | os.O_WRONLY)
for saved in sys.argv[2:]:
    save(store, *map(int, saved.split(",")))
    os.write(acknowledged, (saved + ";").encode())
"""


@dataclass(eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    entries: dict[str, "File | Folder"] = field(default_factory=dict)
    history: list[dict[str, "File | Folder"]] = field(default_factory=lambda: [{}])
    """The entries since the last sync, oldest first; any of them may be found."""


class Disk:
    """What a record has done to a folder, with what of it is safe."""

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        self.root = Folder()

    def apply(self, operation) -> None:
        parent, name = self._place(operation.path)
        node = parent.entries.get(name) if name else self.root
        if operation.call == "create":
            self._enter(parent, name, File())
        elif operation.call == "folder":
            self._enter(parent, name, Folder())
        elif operation.call == "remove":
            del parent.entries[name]
            parent.history.append(dict(parent.entries))
        elif operation.call == "rename":
            target, new_name = self._place(operation.other)
            assert target is parent, "a rename between folders is two changes"
            target.entries[new_name] = parent.entries.pop(name)
            parent.history.append(dict(parent.entries))
        elif operation.call == "sync" and isinstance(node, Folder):
            node.history = [dict(node.entries)]
        elif operation.call == "sync":
            node.synced = bytes(node.content)
        elif operation.call == "truncate":
            del node.content[operation.offset :]
        else:
            assert operation.call == "write"
            end = operation.offset + len(operation.content)
            node.content.extend(bytes(max(0, operation.offset - len(node.content))))
            node.content[operation.offset : end] = operation.content

    def found(self, how, rng) -> Folder:
        """The tree after a cut: `how` is "nothing", "names" or "anything" of what is unsynced."""
        return self._found(self.root, how, rng)

    def write(self, tree: Folder, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, node in tree.entries.items():
            if isinstance(node, Folder):
                self.write(node, path / name)
            else:
                (path / name).write_bytes(node.content)

    def _found(self, folder, how, rng):
        choices = {"nothing": 0, "names": -1, "anything": rng.randrange(len(folder.history))}
        entries = {}
        for name, node in folder.history[choices[how]].items():
            if isinstance(node, Folder):
                entries[name] = self._found(node, how, rng)
            else:
                survives = how == "anything" and rng.random() < 0.5
                content = node.content if survives else node.synced
                entries[name] = File(bytearray(content))
        return Folder(entries)

    def _place(self, path):
        parts = Path(path).relative_to(self.top).parts
        folder = self.root
        for part in parts[:-1]:
            folder = folder.entries[part]
        return folder, parts[-1] if parts else ""

    def _enter(self, parent, name, node):
        parent.entries[name] = node
        parent.history.append(dict(parent.entries))


def record_of(tmp_path, **options):
    """What a process that makes all saves does to `tmp_path / "disk"`."""
    library = require_shim(tmp_path)
    folder, log = tmp_path / "disk", tmp_path / "log"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", SAVER, str(folder), *(f"{step},{v}" for step, v in SAVES)],
        env={**os.environ, **environment(library, folder, log=log, **options)},
        cwd=REPOSITORY,
        check=True,
        timeout=100,
    )
    return recorded(log), folder


def fault_of(root, acknowledged):
    """What a resumed run misses; None if it finds what was acknowledged, or newer."""
    try:
        found = find_intact(root)
    except NoIntactCheckpointError as error:
        return str(error)
    if found is None:
        return "a new run"
    state = load_state(found.path / "actor", "optimizer")
    expected = contents(found.step, state["version"])
    if not all(map(torch.equal, state["moments"], expected["moments"])):
        return f"step {found.step} holds something else"
    if json.loads((found.path / "data.json").read_text()) != {"cursor": found.step}:
        return f"step {found.step} has the data of another"
    if (found.step, state["version"]) < acknowledged:
        return f"step {found.step}, version {state['version']}, instead of {acknowledged}"
    return None


def is_acknowledgement(operation):
    return operation.call == "write" and operation.path.endswith("/acknowledged")


def cut_everywhere(operations, folder, tmp_path, num_cuts):
    """The faults of `num_cuts` cuts after the first acknowledgement, and how many were made."""
    rng, disk, acknowledged = random.Random(5), Disk(folder), None
    first = next(n for n, one in enumerate(operations) if is_acknowledgement(one))
    later = range(first, len(operations))
    ways = ("nothing", "names", "anything")
    cuts = [(place, how) for place in later for how in ways]
    chosen = set(cuts if num_cuts is None else rng.sample(cuts, min(num_cuts, len(cuts))))
    faults = []
    for place, operation in enumerate(operations):
        disk.apply(operation)
        if is_acknowledgement(operation):
            acknowledged = tuple(map(int, operation.content.rstrip(b";").split(b",")))
        for how in (how for how in ways if (place, how) in chosen):
            after = tmp_path / "after" / f"{place}-{how}"
            disk.write(disk.found(how, rng), after)
            fault = fault_of(after / "root", acknowledged)
            if fault is not None:
                faults.append(f"{operation.call} {place} ({how}): {fault}")
    return faults, len(chosen), disk


def is_same(tree, path):
    """Whether the tree is what lies there."""
    names = {one.name for one in path.iterdir()}
    return names == set(tree.entries) and all(
        is_same(node, path / name)
        if isinstance(node, Folder)
        else bytes(node.content) == (path / name).read_bytes()
        for name, node in tree.entries.items()
    )


@pytest.mark.parametrize("num_cuts", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_what_was_committed_survives_a_power_loss_anywhere(tmp_path, num_cuts):
    operations, folder = record_of(tmp_path)
    faults, num_made, disk = cut_everywhere(operations, folder, tmp_path, num_cuts)
    assert is_same(disk.root, folder), "the record holds all that was done"
    assert faults == []
    assert num_made >= (num_cuts or 200)


def test_a_save_that_did_not_sync_would_be_caught(tmp_path):
    operations, folder = record_of(tmp_path, loses_syncs=True)
    faults, _, _ = cut_everywhere(operations, folder, tmp_path, 30)
    assert len(faults) > 10
