"""Which sockets a tree of processes listens on, from /proc."""

import os
from pathlib import Path

import psutil

LISTENING = "0A"


def listening_sockets(root: int) -> dict[str, str]:
    """The address of each, in the kernel's hexadecimal form and without the port, by its name."""
    table = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING:
                table[f"socket:[{inode}]"] = local.partition(":")[0]
    tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    names = {name for process in tree for name in descriptors(process.pid)}
    return {name: table[name] for name in names & table.keys()}


def new_addresses(after: dict[str, str], before: dict[str, str]) -> set[str]:
    return {after[name] for name in after.keys() - before.keys()}


def descriptors(pid: int) -> list[str]:
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return names


LOOPBACK = "0100007F"
