"""The command line: `merge` writes a model folder, `test` compares with one.

Exit codes: 0 done or equal, 1 the weights differ, 2 a mistake in the arguments or the folder.
"""

import argparse
import sys
from collections.abc import Sequence

from verl.model_merger.config import BACKENDS, ModelMergerConfig
from verl.model_merger.merger import FSDPModelMerger, MegatronModelMerger
from verl.utils.checkpoint.layout import CheckpointError

EQUAL, DIFFERENT, MISTAKE = 0, 1, 2
MERGERS = {"fsdp": FSDPModelMerger, "megatron": MegatronModelMerger}


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    try:
        config = ModelMergerConfig(**options)
        merger = MERGERS[config.backend](config)
        return compare(merger) if config.operation == "test" else merge(merger)
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return MISTAKE


def merge(merger: FSDPModelMerger) -> int:
    merger.merge_and_save()
    sys.stdout.write(f"merged {merger.folder} into {merger.config.target_dir}\n")
    return EQUAL


def compare(merger: FSDPModelMerger) -> int:
    differences = merger.compare()
    for difference in differences:
        sys.stdout.write(f"{difference}\n")
    verdict = f"{len(differences)} tensors differ" if differences else "all tensors are equal"
    sys.stdout.write(f"{merger.folder} and {merger.config.test_hf_dir}: {verdict}\n")
    return DIFFERENT if differences else EQUAL


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m verl.model_merger", description=__doc__)
    operations = root.add_subparsers(dest="operation", required=True)
    merging = operations.add_parser("merge", help="write a folder that from_pretrained loads")
    testing = operations.add_parser("test", help="compare with a folder that is known to be right")
    for command in (merging, testing):
        command.add_argument("--backend", choices=BACKENDS, required=True)
        command.add_argument("--local_dir", required=True, help="actor or critic folder of a step")
        command.add_argument("--hf_model_config_path", help="config and tokenizer, if elsewhere")
        command.add_argument("--tie-word-embedding", action="store_true")
        command.add_argument("--trust-remote-code", action="store_true")
        command.add_argument("--is-value-model", action="store_true")
        command.add_argument("--use_cpu_initialization", action="store_true", help="no effect")
    merging.add_argument("--target_dir", default="tmp", help="where the merged model goes")
    merging.add_argument("--hf_upload_path", help="repository on the Hub to upload it to")
    merging.add_argument("--private", action="store_true", help="make that repository private")
    testing.add_argument("--test_hf_dir", required=True, help="model folder to compare with")
    return root


if __name__ == "__main__":
    sys.exit(main())
