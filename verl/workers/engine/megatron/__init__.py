"""Training with megatron-core: tensor, pipeline, context and expert parallelism.

Nothing here imports megatron-core until an engine is asked for: `load_library` names a version that
is missing or another one than was tested, then imports it without the warnings of its own modules.
"""

import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl.config.packages import megatron_problem
from verl.utils.distributed import destroy_global_process_group

if TYPE_CHECKING:
    from verl.workers.engine.megatron.engine import MegatronEngine

__all__ = ["MegatronEngine", "load_library"]

MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.dist_checkpointing",
)
"""Together they import every module that warns."""


def require_library() -> None:
    """Raise if megatron-core cannot be used."""
    if problem := megatron_problem():
        raise ValueError(f"strategy=megatron: {problem}")


@cache
def load_library() -> None:
    """Import megatron-core once, its warnings about packages that it does without left out."""
    require_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            import_module(name)


def leave_layout() -> None:
    """Take down megatron-core's groups and the process group, in a process that goes on."""
    load_library()
    state = import_module("megatron.core.parallel_state")
    state.destroy_model_parallel()
    for name, value in vars(state).items():
        if isinstance(value, dist.ProcessGroup):  # of those that the library forgets to release
            setattr(state, name, None)
    destroy_global_process_group()


def __getattr__(name: str) -> Any:
    if name != "MegatronEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_library()
    return import_module(f"{__name__}.engine").MegatronEngine
