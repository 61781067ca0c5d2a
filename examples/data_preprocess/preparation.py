"""What the scripts of this folder share: the command line, reading raw rows, writing parquet.

A script says where its dataset is and how one raw row becomes one row of verl's; `prepare` does the
rest. Raw rows come from `--local_dataset_path` (a folder as the hub stores it, a parquet file, a
JSON or JSON Lines file), or from the Hugging Face hub where no path is given. A row that does not
fit stops the script with its number: nothing is left out silently, and files appear when they are
complete.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.hdfs_io import copy, makedirs
from verl.utils.import_utils import require

Row = dict[str, Any]
MakeRow = Callable[[Row, str, int], Row]
"""(raw row, split, index in the split) -> row."""

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json"}


class Refusal(Exception):
    """What the user is told instead of a traceback."""


@dataclass(frozen=True)
class Source:
    """A dataset on the hub; `splits` gives the raw split of each file that is written."""

    hub_name: str
    config_name: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})


def command_line(description: str | None, save_dir: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_dataset_path", help="raw data: a folder or a file; else the hub")
    parser.add_argument("--local_save_dir", help=f"folder for the results, default {save_dir}")
    parser.add_argument("--local_dir", help="the old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", help="folder to copy the results to as well")
    parser.set_defaults(default_save_dir=save_dir)
    return parser


def with_tools(row: Row, create_kwargs: Mapping[str, Mapping[str, Any]]) -> Row:
    """The row for `tool_agent`: for each tool, what its instance of this row is made with."""
    tools_kwargs = {name: {"create_kwargs": dict(made)} for name, made in create_kwargs.items()}
    extra_info = {**row["extra_info"], "need_tools_kwargs": True, "tools_kwargs": tools_kwargs}
    return {**row, "agent_name": "tool_agent", "extra_info": extra_info}


def prepare(arguments: argparse.Namespace, source: Source, make_row: MakeRow) -> None:
    """Read the raw splits, map their rows and write a parquet file for each."""
    try:
        raw = raw_splits(arguments.local_dataset_path, source)
        wanted = {name: raw[split] for name, split in source.splits.items() if split in raw}
        if not wanted:
            raise Refusal(
                f"the raw data has the splits {', '.join(raw)}; expected one of "
                f"{', '.join(source.splits.values())}"
            )
        made = {name: mapped(rows, make_row, name) for name, rows in wanted.items()}
        write(made, arguments)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")


def write(splits: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """One parquet file per split, and a copy on HDFS if asked; says what it wrote."""
    folder = save_dir(arguments)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.hdfs_dir is not None:
            makedirs(arguments.hdfs_dir, exist_ok=True)
        for name, rows in splits.items():
            path, unfinished = folder / f"{name}.parquet", folder / f"{name}.parquet.unfinished"
            rows.to_parquet(str(unfinished))
            os.replace(unfinished, path)
            if arguments.hdfs_dir is not None:
                copy(str(path), arguments.hdfs_dir)
            print(f"{path}: {len(rows):,} rows")
    except (OSError, RuntimeError) as error:  # a full disk; HDFS that cannot be reached
        sys.exit(f"error: cannot write the results: {error}")


def save_dir(arguments: argparse.Namespace) -> Path:
    new, old = arguments.local_save_dir, arguments.local_dir
    if old is not None:
        print("note: --local_dir is now --local_save_dir", file=sys.stderr)
        if new not in (None, old):
            sys.exit(f"error: --local_dir is {old}, --local_save_dir is {new}; give one of them")
    return Path(new or old or arguments.default_save_dir).expanduser()


def raw_splits(local_path: str | None, source: Source) -> Mapping[str, Any]:
    """The raw rows of each split, as the `datasets` package reads them."""
    datasets = require("datasets", extra="data")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if local_path is None:
        return from_hub(source)
    path = Path(local_path).expanduser()
    if not path.exists():
        raise Refusal(f"there is no file or folder {local_path} (--local_dataset_path)")
    try:
        if path.is_file():
            return from_file(path)
        if (path / "dataset_dict.json").exists():  # written by `DatasetDict.save_to_disk`
            return datasets.load_from_disk(str(path))
        known = datasets.get_dataset_config_names(str(path))
        config = source.config_name if source.config_name in known else None
        return datasets.load_dataset(str(path), config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise Refusal(f"cannot read {local_path} (--local_dataset_path): {error}") from error


def from_file(path: Path) -> Mapping[str, Any]:
    """One file is one split; its name tells which."""
    if path.suffix not in FORMATS:
        raise Refusal(f"{path} ends in {path.suffix!r}; expected one of {', '.join(FORMATS)}")
    split = next((name for name in ("test", "validation") if name in path.stem), "train")
    return require("datasets", extra="data").load_dataset(
        FORMATS[path.suffix], data_files={split: str(path)}
    )


def from_hub(source: Source) -> Mapping[str, Any]:
    datasets = require("datasets", extra="data")
    try:
        return datasets.load_dataset(source.hub_name, source.config_name)
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise Refusal(
            f"cannot get {source.hub_name} from the Hugging Face hub: {error}\n"
            f"Where there is a network, run `hf download {source.hub_name} --repo-type dataset "
            "--local-dir raw`, bring the folder here and pass --local_dataset_path raw"
        ) from error


def mapped(rows: Any, make_row: MakeRow, split: str) -> Any:
    """The rows that `make_row` makes, and none of the raw columns."""

    def make(raw: Row, index: int) -> Row:
        try:
            return make_row(raw, split, index)
        except KeyError as error:
            columns = ", ".join(rows.column_names)
            raise Refusal(f"{split} row {index + 1} has no {error}; columns: {columns}") from error
        except (ValueError, TypeError) as error:
            raise Refusal(f"{split} row {index + 1}: {error}") from error

    return rows.map(
        make, with_indices=True, remove_columns=rows.column_names, load_from_cache_file=False
    )
