"""What generation writes: the output file, and finished batches until all of them are there.

    answers.parquet              the input, row by row, with a column `responses`
    answers.parquet.parts/
        run.json                 identity of the run
        00000000.parquet         rows 0 to batch_size - 1, with checksums
        .lock                    held by the run that writes

Every file appears under its name when it is whole and on the disk. After a kill the next run finds
every batch that was finished; a batch that cannot be read is generated again. The identity (input,
model files, every option that may change a response) decides whether a run continues another one,
and whether an output file counts as done. Options about where and how fast to run are free, because
each response has a seed of its own.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from verl.config.convert import to_dict
from verl.config.generation import GenerationConfig
from verl.utils.checkpoint.layout import make_folders, sync_folder, write_durably
from verl.utils.checkpoint.manifest import compare, config_identity, dataset_identity, fingerprint
from verl.utils.dataset.tables import DataError
from verl.utils.environment import Refused

logger = logging.getLogger(__name__)

Identity = dict[str, dict[str, Any]]

MAY_CHANGE = (
    "trainer.*", "actor.*", "ray_kwargs.*",
    "data.path", "data.output_path", "data.overwrite",
    "rollout.python", "rollout.gpu_memory_utilization", "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens", "rollout.*_parallel_size", "rollout.enforce_eager",
    "rollout.cudagraph_capture_sizes", "rollout.free_cache_engine", "rollout.enable_*",
    "rollout.disable_log_stats", "rollout.n_gpus_per_node", "rollout.nnodes", "rollout.server.*",
    "rollout.prometheus.*", "rollout.profiler.*", "rollout.trace.*",
)  # fmt: skip
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")


def identity_of(
    config: GenerationConfig, source: str, *, num_rows: int, model_path: str
) -> Identity:
    """`source` and `model_path` are local; a model that is only a name is told by the name."""
    folder = Path(model_path)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return fingerprint(
        model=dataset_identity([file for file in files if file.suffix in MODEL_FILES]),
        data=dataset_identity([source], num_rows=num_rows),
        config=config_identity(to_dict(config)),
    )


def differences(old: Identity, new: Identity) -> list[str]:
    """A sentence for each thing that forbids to go on; empty when it is the same run."""
    return compare(old, new, may_change=MAY_CHANGE)


COLUMN = "responses"
IDENTITY_KEY = b"verl.generation"
RESPONSES = pa.list_(pa.string())


def is_done(output: Path, identity: Identity, *, overwrite: bool) -> bool:
    """Whether the file is there already; a file from other settings needs `overwrite`."""
    if not output.exists():
        return False
    made_from = identity_in(output)
    changed = ["it was not written by this command"]
    if made_from is not None:
        changed = differences(made_from, identity)
    if changed and not overwrite:
        raise DataError(
            f"data.output_path is {output}, which exists, and this run would change it:\n  "
            + "\n  ".join(changed)
            + "\nSet data.overwrite=True to replace it, or choose another data.output_path"
        )
    return not changed


def identity_in(output: Path) -> Identity | None:
    """What the file says it was made from."""
    try:
        metadata = pq.read_schema(output).metadata or {}
    except (pa.ArrowException, OSError):
        return None
    text = metadata.get(IDENTITY_KEY)
    return None if text is None else json.loads(text)


def write_output(
    source: str, output: Path, responses: Iterator[list[str]], identity: Identity
) -> None:
    """`responses` has one list for each row of `source`, in order."""
    partial = output.with_name(f".{output.name}.partial")
    file = pq.ParquetFile(source)
    kept = [name for name in file.schema_arrow.names if name != COLUMN]
    schema = output_schema(file.schema_arrow, identity)
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for batch in file.iter_batches(columns=kept):
                column = pa.array(islice(responses, batch.num_rows), type=RESPONSES)
                columns: list[Any] = [*batch.select(kept).columns, column]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        publish(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def output_schema(source: pa.Schema, identity: Identity) -> pa.Schema:
    fields = [field for field in source if field.name != COLUMN]
    metadata = {**(source.metadata or {}), IDENTITY_KEY: json.dumps(identity).encode()}
    return pa.schema([*fields, pa.field(COLUMN, RESPONSES)], metadata=metadata)


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
        try:
            make_folders(self.folder)
        except OSError as error:
            raise Refused(
                f"data.output_path is {output}, which cannot be written: {error.strerror} "
                f"({error.filename}); choose another data.output_path"
            ) from error
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
