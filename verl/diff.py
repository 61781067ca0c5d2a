"""Where two recorded runs part: `python -m verl.diff FIRST SECOND`.

Exits with 0 if every step that both have is equal, with 1 if not, with 2 if one cannot be read.
"""

import argparse
import sys
from pathlib import Path

from verl.board.compare import first_difference
from verl.board.reader import one_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.diff", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    try:
        ours, theirs = (one_run(path) for path in (options.first, options.second))
        common = {e["step"] for e in ours.steps()} & {e["step"] for e in theirs.steps()}
        if not common:
            raise ValueError("the runs have no step in common")
        found = first_difference(ours, theirs)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if found is None:
        first, last = min(common), max(common)
        sys.stdout.write(f"equal in all {len(common)} steps that both have ({first} to {last})\n")
        return 0
    sys.stdout.write(f"{found}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
