"""One JSON object per line: `{"step": 3, "data": {"actor/entropy": 0.7}}`.

Each line is one unbuffered append, so a reader never sees half a line of a living run, several
processes may share the file, and a killed run keeps every step it logged. JSON has no NaN or
infinity; they are written as the strings "NaN", "Infinity" and "-Infinity", which `float()` reads
back. A value JSON cannot hold is written as its repr.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.environment import file_logger_path, file_logger_root
from verl.utils.tracking_backends.base import TrackingBackend, plain


class FileBackend(TrackingBackend):
    def __init__(self, project_name: str, experiment_name: str, config: Any = None) -> None:
        super().__init__(project_name, experiment_name, config)
        self.path = metrics_path(project_name, experiment_name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644
        )
        self._end_torn_line()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        line = json.dumps({"step": step, "data": jsonable(data)}, allow_nan=False)
        self._append(line.encode() + b"\n")

    def finish(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed: log before `finish`")
        written = os.write(self._descriptor, line)
        if written != len(line):  # a full disk; the torn line is ended when the file is next opened
            raise OSError(f"wrote {written} of {len(line)} bytes to {self.path}: is the disk full?")

    def _end_torn_line(self) -> None:
        """A machine that lost power may have left half a line; the next one starts on its own."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append(b"\n")


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """`$VERL_FILE_LOGGER_PATH`, else `$VERL_FILE_LOGGER_ROOT/<project>/<experiment>.jsonl`."""
    explicit = file_logger_path()
    if explicit is not None:
        return Path(explicit).expanduser()
    return Path(file_logger_root()).expanduser() / project_name / f"{experiment_name}.jsonl"


def jsonable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)
