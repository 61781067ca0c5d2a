"""Finished batches, a file each, in a folder beside the output until all are there.

    answers.parquet.parts/
        run.json             what the batches were made from (`identity`)
        00000000.parquet     rows 0 to batch_size - 1, with checksums
        .lock                held by the run that is at work

A file appears under its name when it is whole and on the disk. After a kill the next run finds
every batch that was finished; one that cannot be read is made again.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from verl.trainer.generation.identity import Identity, differences
from verl.utils.checkpoint.layout import make_folders, sync_folder, write_durably
from verl.utils.dataset.tables import DataError

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    {
        "responses": pa.list_(pa.string()),
        "num_tokens": pa.list_(pa.int64()),
        "stop_reasons": pa.list_(pa.string()),
    }
)
PARTIAL = ".partial"


@dataclass(frozen=True)
class Answers:
    """The responses to one prompt, in the order of their numbers; none to a bad one."""

    responses: list[str]
    num_tokens: list[int]
    stop_reasons: list[str]


NO_ANSWERS = Answers([], [], [])


class Parts:
    """The batches of one output file. `close` lets another run have them, `remove` ends them."""

    def __init__(self, output: Path, identity: Identity, *, overwrite: bool) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        make_folders(self.folder)
        self._lock = FileLock(self.folder / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DataError(
                f"another run is writing {output} (it holds {self.folder}); wait for it, stop it, "
                "or choose another data.output_path"
            ) from None
        self._claim(identity, overwrite)

    def finished(self, sizes: Sequence[int]) -> set[int]:
        """The batches that are there, whole; `sizes` has the rows of each."""
        return {batch for batch, size in enumerate(sizes) if self._is_whole(batch, size)}

    def save(self, batch: int, answers: Sequence[Answers]) -> None:
        """Keep a batch; once this returns, no kill takes it away."""
        table = pa.Table.from_pylist([asdict(one) for one in answers], schema=SCHEMA)
        partial = self._file(batch).with_suffix(PARTIAL)
        pq.write_table(table, partial, write_page_checksum=True)
        publish(partial, self._file(batch))

    def read(self, batch: int) -> pa.Table:
        return pq.read_table(self._file(batch), schema=SCHEMA, page_checksum_verification=True)

    def close(self) -> None:
        self._lock.release()

    def remove(self) -> None:
        """The output file has everything."""
        shutil.rmtree(self.folder)
        self._lock.release()

    def _claim(self, identity: Identity, overwrite: bool) -> None:
        """Make the folder ours: empty, or with batches of the same run."""
        record = self.folder / "run.json"
        if record.is_file():
            changed = differences(json.loads(record.read_text()), identity)
            if changed and not overwrite:
                self._lock.release()
                raise DataError(
                    f"{self.folder} has unfinished results of other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nGo back to those settings to finish them, set data.overwrite=True to "
                    "start anew, or choose another data.output_path"
                )
            if not changed:
                return
        for file in self.folder.glob("*.parquet"):
            file.unlink()
        partial = record.with_suffix(PARTIAL)
        write_durably(partial, json.dumps(identity, indent=1).encode())
        publish(partial, record)

    def _is_whole(self, batch: int, size: int) -> bool:
        file = self._file(batch)
        if not file.is_file():
            return False
        try:
            num_rows = self.read(batch).num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            logger.warning("%s is damaged and made again: %s", file, error)
            return False
        return num_rows == size

    def _file(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.parquet"


def publish(partial: Path, target: Path) -> None:
    """Give a file that is written its name, such that both last."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    sync_folder(target.parent)
