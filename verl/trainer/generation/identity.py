"""What must stay the same for a run to go on behind another, or for a file to count as done.

The input, the model's files and every option that may change a response. Options about where and
how fast to run are free, because each response has a seed of its own.
"""

from pathlib import Path
from typing import Any

from verl.config.convert import to_dict
from verl.config.generation import GenerationConfig
from verl.utils.checkpoint.manifest import compare, config_identity, dataset_identity, fingerprint

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
