"""What makes two runs the same run, so that none continues from another's checkpoint.

A fingerprint has a flat dictionary per section, all JSON: the model's parameters, the files of the
dataset, the options. `compare` says in words what differs. Options that only steer how long a run
goes on, what it reports, on how many devices it runs and how it uses memory may change; every other
one may not.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # committing and verifying a step needs no torch
    from torch import Tensor, nn

MAY_CHANGE = (
    "trainer.total_epochs", "trainer.total_training_steps", "*.total_training_steps",
    "trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.wandb_proxy",
    "trainer.log_val_generations", "trainer.save_freq", "trainer.test_freq", "trainer.val_*",
    "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.resume_*",
    "trainer.default_*_dir", "trainer.*ckpt*", "trainer.esi_redundant_time", "trainer.dry_run",
    "trainer.max_restarts",
    "trainer.controller", "trainer.use_legacy_worker_impl", "trainer.*timeout*",
    "trainer.prometheus.*", "trainer.profile*",
    "data.train_files", "data.val_*", "data.validation_shuffle", "data.*_workers",
    "checkpoint.*", "*.checkpoint.*", "profiler.*", "*.profiler.*", "global_profiler.*",
    "*.trace.*", "*.prometheus.*", "*.val_kwargs.*", "*._target_", "*.checkpoint_engine.*",
    "ray_kwargs.*", "transfer_queue.*",
    "*micro_batch_size*", "*max_token_len*", "*use_dynamic_bsz", "*gpu_memory_utilization",
    "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.balance_batch",
    "resource_pool", "resource_pool.*",
    "*.n_gpus_per_node", "*.nnodes", "*.enable_resource_pool", "*.hybrid_engine", "*.nccl_timeout",
    "*.fsdp_size", "*.sharding", "*.reshard_after_forward", "*.forward_prefetch",
    "*.wrap_policy.*", "*offload*", "*ulysses_sequence_parallel_size",
    "*tensor_model_parallel_size",
)  # fmt: skip
MAX_DIFFERENCES = 20
SAMPLE_BYTES = 8 << 20


def fingerprint(
    *,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Put the parts that apply together; each from the function of its name below."""
    parts = {"model": model, "data": data, "config": config}
    return {name: dict(part) for name, part in parts.items() if part is not None}


def model_identity(model: "nn.Module") -> dict[str, str]:
    """Dtype and shape of every parameter; tied ones once."""
    return {
        "class": type(model).__name__,
        **{name: describe(parameter) for name, parameter in model.named_parameters()},
    }


def describe(tensor: "Tensor | None") -> str:
    """Dtype and shape in words, as in `bfloat16[32, 48]`."""
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def dataset_identity(
    files: Sequence[str | Path], *, num_rows: int | None = None, digest: str | None = None
) -> dict[str, Any]:
    """Name, size and hash of every file, in order; or a digest for data that is not in files.

    A large file is hashed at its two ends only. `num_rows` is what was left after filtering.
    """
    identity: dict[str, Any] = {
        f"file {number}": _file_identity(Path(file)) for number, file in enumerate(files)
    }
    extras = {"rows": num_rows, "digest": digest}
    return identity | {key: value for key, value in extras.items() if value is not None}


def config_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every option by its dotted path. Give the plain dictionary: reading a typed configuration
    here would make every option count as used."""
    return dict(_flatten(config, ""))


def compare(
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    *,
    may_change: Sequence[str] = MAY_CHANGE,
) -> list[str]:
    """A sentence per difference that forbids to continue; empty when it is the same run."""
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    differences: list[str] = []
    for section in sorted(old.keys() | new.keys()):
        allowed = may_change if section == "config" else ()
        found = list(_compare_section(section, old.get(section, {}), new.get(section, {}), allowed))
        differences += found[:MAX_DIFFERENCES]
        if len(found) > MAX_DIFFERENCES:
            differences.append(f"{section}: and {len(found) - MAX_DIFFERENCES} more differences")
    return differences


def _compare_section(
    section: str, old: Mapping[str, Any], new: Mapping[str, Any], may_change: Sequence[str]
) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if any(fnmatchcase(key, pattern) for pattern in may_change):
            continue
        if key not in new:
            yield f"{section}: {key} was {old[key]!r} and is gone"
        elif key not in old:
            yield f"{section}: {key} is new: {new[key]!r}"
        elif old[key] != new[key]:
            yield f"{section}: {key} was {old[key]!r} and is {new[key]!r}"


def _file_identity(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        if size > 2 * SAMPLE_BYTES:
            file.seek(-SAMPLE_BYTES, 2)
        digest.update(file.read(SAMPLE_BYTES))
    return f"{path.name}, {size} bytes, sha256 {digest.hexdigest()[:32]}"


def _flatten(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _as_json(value)


def _as_json(value: Any) -> Any:
    """The value itself where JSON has it, else its text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)
