"""What adapters look like, as a configuration says it."""

import re
from dataclasses import dataclass

from verl.config.base import BaseConfig
from verl.config.critic import FSDPCriticModelCfg
from verl.config.model import HFModelConfig

ALL_LINEAR = "all-linear"
NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The form of the adapters; `adapter_path` brings its own, and the rest must not contradict."""

    rank: int = 0
    """0 only with `adapter_path`."""

    alpha: int = 16
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` (arXiv:2312.03732) instead of `alpha / rank`."""

    target_modules: str | list[str] = ALL_LINEAR
    """Layers that get an adapter: names, a regular expression, or `all-linear`."""

    exclude_modules: str | list[str] | None = None
    adapter_path: str | None = None
    """Start from this adapter instead of a new one."""


def lora_options(model: BaseConfig) -> LoraOptions | None:
    """What the configuration of a model asks for; None trains all weights."""
    if isinstance(model, HFModelConfig):
        rank = model.lora_rank or model.lora.rank
        if not rank and model.lora_adapter_path is None:
            return None
        return LoraOptions(
            rank=rank,
            alpha=model.lora_alpha,
            use_rslora=model.use_rslora,
            target_modules=names_or_pattern(model.target_modules),
            exclude_modules=names_or_pattern(model.exclude_modules or []) or None,
            adapter_path=model.lora_adapter_path,
        )
    if isinstance(model, FSDPCriticModelCfg) and model.lora_rank:
        return LoraOptions(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=names_or_pattern(model.target_modules),
        )
    return None


def names_or_pattern(modules: str | list[str]) -> str | list[str]:
    """A list of names as it is; of a text, the names in it unless it is a regular expression."""
    if not isinstance(modules, str):
        return [str(name) for name in modules]
    if modules.lower() == ALL_LINEAR:
        return ALL_LINEAR
    names = [name.strip() for name in modules.split(",")]
    return names if all(map(NAME.fullmatch, names)) else modules
