"""Training with megatron-core: tensor, pipeline, context and expert parallelism.

Nothing here imports megatron-core until an engine is asked for: `load_library` names a version that
is missing or another one than was tested, then imports it without the warnings of its own modules.
"""

import warnings
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.workers.engine.megatron.engine import MegatronEngine

__all__ = ["MegatronEngine", "load_library"]

VERSION = "0.16.1"
"""Of megatron-core. Its internals change from one minor version to the next."""

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
    install = "pip install 'verl[megatron]'"
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"strategy=megatron needs the package megatron-core {VERSION}, which is not installed: "
            f"{install}, or set strategy=fsdp"
        ) from None
    if found.split(".")[:2] != VERSION.split(".")[:2]:
        raise ValueError(
            f"strategy=megatron needs megatron-core {VERSION}, but {found} is installed: {install}"
        )


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
