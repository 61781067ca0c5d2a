"""The responses of a step on disk, for reading afterwards: `<folder>/<step>.jsonl`.

One line per response: `{"input", "output", "gts", "score", "step"}` and whatever the reward
reported beside the score. A file appears when it is complete.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.tracking import jsonable

# Controls from U+007F on, line separators, direction marks, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def dump_generations(
    folder: str | Path,
    step: int,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    reward_extra_infos: Mapping[str, Sequence[Any]],
) -> Path:
    """Write one step and return the path. Every column has one entry per response."""
    columns = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
    columns |= {key: values for key, values in reward_extra_infos.items() if key not in columns}
    for name, values in columns.items():
        if len(values) != len(inputs):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(inputs)} responses; a response "
                "without a value needs None in its place"
            )
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for row in range(len(inputs)):
            entry = {name: jsonable(values[row]) for name, values in columns.items()}
            file.write(readable_json({**entry, "step": step}) + "\n")
    os.replace(unfinished, path)
    return path


def readable_json(entry: Mapping[str, Any]) -> str:
    """All scripts as they are written; what could steer a terminal or break a line is escaped."""
    text = json.dumps(entry, ensure_ascii=False)  # escapes the controls below U+0020 by itself
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
