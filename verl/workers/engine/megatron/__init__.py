"""Training with megatron-core: tensor, pipeline, context and expert parallelism.

Nothing here imports megatron-core until an engine is asked for: `load_library` names a version that
is missing or another one than was tested, then imports it without the warnings of its own modules.
"""

import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl.config.packages import megatron_problem

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


def __getattr__(name: str) -> Any:
    if name != "MegatronEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_library()
    return import_module(f"{__name__}.engine").MegatronEngine
