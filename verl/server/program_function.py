"""Calls a Python function as an agent program: `program_function.py file.py function reward_file`

The function gets the row, read from standard input, as a mapping. What it returns is the reward: a
number, a mapping with `reward` (or `score`), or None. It may be a coroutine function. This file is
started by its name and imports the standard library only.
"""

import asyncio
import importlib.util
import inspect
import json
import sys
from pathlib import Path


def main(file: str, name: str, reward_file: str) -> None:
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if name not in vars(module):
        raise SystemExit(f"{file} has no function {name!r}")
    value = vars(module)[name](json.load(sys.stdin))
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if value is not None:
        Path(reward_file).write_text(json.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
