"""Small questions about Hugging Face models: positions, sizes, configuration, weight names."""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from tensordict import NonTensorData
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.hub import has_file

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions that count real tokens from 0, whatever is padded on the left: (B, L) -> (B, L)."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """A mask like those of real batches: padding, then real tokens, then padding, all at random.

    The ratios are shares of the length L; each row has at least one real token. From torch's RNG.
    """
    num_rows, length = input_ids.shape
    most_valid = int(length * max_ratio_of_valid_token)
    least_valid = max(1, int(length * min_ratio_of_valid_token))
    most_left = int(length * max_ratio_of_left_padding)
    if most_valid + most_left > length or most_valid < least_valid:
        raise ValueError(
            f"of {length} positions at most {most_left} are left padding and {least_valid} to "
            f"{most_valid} are tokens; that must fit, with at least one token"
        )
    device = input_ids.device
    left = torch.randint(0, most_left + 1, (num_rows, 1), device=device)
    valid = torch.randint(least_valid, most_valid + 1, (num_rows, 1), device=device)
    position = torch.arange(length, device=device)
    return ((position >= left) & (position < left + valid)).to(input_ids.dtype)


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set attributes of a model's configuration; a mapping goes into a nested configuration.

    Models may read attributes that their configuration does not declare, so an unknown name is set
    too, but logged with the closest known one.
    """
    known = dir(module_config)
    for key, value in override_config_kwargs.items():
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            kind = type(module_config).__name__
            logger.warning("the override %r is new to %s%s", key, kind, hint)
        part = getattr(module_config, key) if key in known else None
        if isinstance(value, Mapping) and part is not None and not isinstance(part, Mapping):
            update_model_config(part, value)
        else:
            setattr(module_config, key, value)


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The model's `generation_config.json`, else what its `config.json` implies, else None."""
    if has_file(model, "generation_config.json"):
        return GenerationConfig.from_pretrained(model)
    if has_file(model, "config.json"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(config)
    return None


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Number of parameters as (amount, unit); `scale` is "B", "M", "K", "" or "auto"."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1}
    if scale == "auto":
        scale = next(unit for unit, size in units.items() if num_parameters > size or unit == "")
    if scale not in units:
        raise ValueError(f"scale is {scale!r}; it must be one of: auto, {', '.join(units)}")
    return num_parameters / units[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Log the number of parameters."""
    amount, unit = get_model_size(model)
    logger.info("%s contains %.2f%s parameters", name or type(model).__name__, amount, unit)


def convert_weight_keys(state_dict: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Name and lay out weights as in the model's checkpoint files, which inference engines read."""
    return revert_weight_conversion(model, state_dict)


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, Tensor] | NonTensorData | None],
    indices: Sequence[int] | None = None,
) -> dict[str, Tensor | list[Tensor]]:
    """Join the image and video inputs of the rows `indices` (default: all), in their order.

    Rows of text only (None or empty) add nothing. Each key is joined along dimension 0; models
    that mark image positions per row (`image_bound`) get lists with one entry per row instead.
    """
    rows = [batch_data[i] for i in indices] if indices is not None else batch_data
    collected: dict[str, list[Tensor]] = {}
    for row in rows:
        entries = row.data if isinstance(row, NonTensorData) else row
        for key, value in (entries or {}).items():
            if value is not None:
                collected.setdefault(key, []).append(value)
    if "image_bound" in collected:
        return dict(collected)
    return {key: torch.cat(values, dim=0) for key, values in collected.items()}
