"""Grade stored responses again, and count those whose score is another now.

    python -m verl.trainer.ppo.regrade FOLDER [--data-source NAME]

FOLDER is a run's `trainer.rollout_data_dir`: `<step>.jsonl` with `output`, `gts`, `score` and
`data_source` of each response. A score that is another now, or none, is a flip; a grader that fails
gives neither. A run that continues with other graders than those of its checkpoint counts its flips
too. Only built-in graders are asked, so the scores must be theirs: not those of a function of one's
own, nor with the penalty of `reward_manager=dapo`.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.reward_score import default_compute_score, scorers

MAX_RESPONSES = 2000
"""Of the newest steps, unless the caller says otherwise."""

TOLERANCE = 1e-6
NUM_SHOWN = 5


@dataclass
class Regrading:
    """What became of the stored responses of one data source."""

    num_graded: int = 0
    flips: list[dict[str, Any]] = field(default_factory=list)
    """The stored entries, with `now`: the new score, or None for no verdict."""

    failures: list[Exception] = field(default_factory=list)
    """What graders raised instead of a verdict."""


def regrade(
    folder: str | Path,
    data_source: str | None = None,
    max_responses: int = MAX_RESPONSES,
    *,
    max_seconds: float = math.inf,
    grade: Callable[..., Any] = default_compute_score,
) -> dict[str, Regrading]:
    """By data source, newest steps first; `data_source` is that of entries which do not say."""
    found: dict[str, Regrading] = defaultdict(Regrading)
    deadline = time.monotonic() + max_seconds
    for number, entry in enumerate(_entries(Path(folder).expanduser())):
        if number == max_responses or time.monotonic() > deadline:
            break
        source = entry.get("data_source", data_source)
        is_known = source in scorers or str(source).startswith("aime")
        if not is_known or entry.get("gts") is None:
            continue
        regrading = found[source]
        try:
            result = grade(source, entry["output"], entry["gts"])
        except Exception as error:
            regrading.failures.append(error)
            continue
        now = result["score"] if isinstance(result, dict) else result
        regrading.num_graded += 1
        if now is None or abs(now - entry["score"]) > TOLERANCE:
            regrading.flips.append({**entry, "now": now})
    return dict(found)


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    steps = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdigit()}
    for step in sorted(steps, reverse=True):
        with steps[step].open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-source", help="of responses that do not say theirs")
    parser.add_argument("--max-responses", type=int, default=sys.maxsize)
    chosen = parser.parse_args(arguments)
    found = regrade(chosen.folder, chosen.data_source, chosen.max_responses)
    if not found:
        parser.error(
            f"{chosen.folder} holds no response that a built-in grader has scored; it should be a "
            "trainer.rollout_data_dir, and --data-source names the grader of older files"
        )
    for source, regrading in sorted(found.items()):
        flips = regrading.flips
        lines = [f"{source}: {len(flips)} of {regrading.num_graded} scores are others now"]
        lines += [
            f"  step {flip['step']}: was {flip['score']:g}, is {flip['now']}; gold answer "
            f"{str(flip['gts'])[:80]!r}, response ends {flip['output'][-80:]!r}"
            for flip in flips[:NUM_SHOWN]
        ]
        if regrading.failures:
            lines.append(f"  {len(regrading.failures)} not graded: {regrading.failures[0]!r}")
        sys.stdout.write("\n".join(lines) + "\n")
    return 1 if any(regrading.flips for regrading in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
