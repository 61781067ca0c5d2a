"""The output file: the input, row by row, with a column `responses`.

It is written beside its place and appears there when it is whole. Its metadata say what it was made
from, so that the same command finds it done and another one does not replace it unasked.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.trainer.generation.identity import Identity, differences
from verl.trainer.generation.parts import publish
from verl.utils.dataset.tables import DataError

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
