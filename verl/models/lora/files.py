"""Adapters on disk: a folder in peft's own format, which `PeftModel.from_pretrained` loads.

    adapter_config.json          rank, scaling, which layers
    adapter_model.safetensors    the adapters' weights, and a value model's head

A stored adapter says itself what form it has. Only plain LoRA is read: a variant that computes
something else, or that changes the base weights, would silently be another model here.
"""

import logging
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.lora.layers import ADAPTER, is_adapter, peft_config
from verl.models.lora.options import LoraOptions
from verl.utils.import_utils import require

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "lora_adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
FORM = (
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""What decides where adapters are and how large."""

WITHOUT_MEANING = (
    "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "peft_version", "init_lora_weights", "lora_dropout",
)  # fmt: skip
"""What says nothing about a trained adapter without dropout."""

INITIALISATIONS_THAT_LEAVE_THE_BASE = (True, False, "gaussian")


def adapter_weights(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """What is trained beside the base weights, under the names that peft gives it on disk.

    `parameters` are the model's own by name; give them where the model holds only shards.
    """
    heads = tuple(f"{name}." for name in peft_config(model).modules_to_save or ())
    return {
        f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER}', '')}": parameter.detach()
        for name, parameter in parameters or model.named_parameters()
        if (is_adapter(name) and f".{ADAPTER}." in name) or name.startswith(heads)
    }


def save_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(peft_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    weights = adapter_weights(model, parameters)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    (folder / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the adapter in `folder` into the model's own, in place; they must have the same form."""
    file = Path(folder).expanduser() / WEIGHTS_FILE
    stored, own = load_file(file), adapter_weights(model)
    wrong = [
        f"{name} is {shape_of(stored, name)} there and {shape_of(own, name)} here"
        for name in sorted(stored.keys() | own.keys())
        if shape_of(stored, name) != shape_of(own, name)
    ]
    if wrong:
        raise ValueError(
            f"the adapter in {file} does not fit: {'; '.join(wrong[:4])}; set lora_rank and "
            "target_modules as they are in its adapter_config.json"
        )
    for name, weight in own.items():
        weight.copy_(stored[name])


def shape_of(weights: dict[str, Tensor], name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "missing"


def stored_config(folder: str | Path, options: LoraOptions) -> Any:
    """The form of the adapter in `folder`; an error if it is not plain LoRA, or has another rank
    than `options` asks for."""
    folder = Path(folder).expanduser()
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"lora_adapter_path is {folder}, which has no {' and no '.join(missing)}; it must be a "
            "local folder that peft has saved with safetensors"
        )
    kind = require("peft", "peft").LoraConfig
    stored = kind.from_pretrained(str(folder))
    refuse_variants(stored, kind(), folder)
    if options.rank not in (0, stored.r):
        raise ValueError(
            f"lora_rank is {options.rank}, but the adapter in {folder} has rank {stored.r}; leave "
            "lora_rank out to take the adapter's"
        )
    if stored.lora_dropout:
        logger.warning("%s was trained with dropout; it continues without", folder)
    form = {name: vars(stored)[name] for name in FORM}
    return kind(**form, task_type="CAUSAL_LM")


def refuse_variants(stored: Any, plain: Any, folder: Path) -> None:
    """`stored` and `plain` are peft configurations; `plain` is one that nobody has changed."""
    odd = [
        f"{name}={value!r}"
        for name, value in vars(stored).items()
        if name not in (*FORM, *WITHOUT_MEANING) and value != vars(plain)[name]
    ]
    if stored.init_lora_weights not in INITIALISATIONS_THAT_LEAVE_THE_BASE:
        odd.append(f"init_lora_weights={stored.init_lora_weights!r}")
    if odd:
        raise ValueError(
            f"the adapter in {folder} is more than plain LoRA ({', '.join(odd)}); merge it into "
            "its base model with peft and start from the merged model"
        )
