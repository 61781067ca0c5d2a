"""Adapters in checkpoints: merged into their base, or kept beside it where ranks hold both.

Our own checkpoints hold the adapter alone; the base is the model that its config names. Files of
other runs hold base and adapter together, in the names that peft gives them while training.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verl.model_merger.weights import LazyWeights, lazy_tensor
from verl.models.lora import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    LoraOptions,
    add_lora,
    is_adapter,
    merged_copy,
)
from verl.utils.checkpoint.hf_model import own_weights, published_weights

BASE_LAYER = ".base_layer"


def merge_saved_adapter(folder: Path, *, trust_remote_code: bool) -> LazyWeights:
    """The base model that the adapter names, with the adapter added to its weights."""
    path = str(folder / ADAPTER_FOLDER)
    options = LoraOptions(rank=0, adapter_path=path)
    base = base_of(folder / ADAPTER_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", trust_remote_code=trust_remote_code
    )
    merged = merged_copy(add_lora(model, options))
    weights = published_weights(merged, own_weights(merged))
    return {name: lazy_tensor(weight) for name, weight in weights.items()}


def base_of(adapter: Path) -> str:
    base = json.loads((adapter / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter / CONFIG_FILE} does not name the model that the adapter belongs to; write "
            "its path there, as base_model_name_or_path"
        )
    return str(base)


def has_adapter_names(weights: LazyWeights) -> bool:
    return any(is_adapter(name) for name in weights)


def split_adapter(weights: LazyWeights) -> tuple[LazyWeights, LazyWeights]:
    """The base's weights under their own names, and the adapter's under peft's names on disk."""
    base = {
        name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, ""): tensor
        for name, tensor in weights.items()
        if not is_adapter(name)
    }
    adapter = {
        name.replace(".default.", "."): tensor
        for name, tensor in weights.items()
        if is_adapter(name)
    }
    return base, adapter


def write_adapter(weights: LazyWeights, source: Path, target: Path) -> None:
    """An adapter folder as peft loads it; its scale is in the config, which nobody can guess."""
    config = source / CONFIG_FILE
    if not config.is_file():
        raise ValueError(
            f"the shards hold an adapter, but {config} is missing, which says how it is scaled "
            "(lora_alpha); put the adapter's config there"
        )
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, target / CONFIG_FILE)
    tensors = {name: tensor.read() for name, tensor in weights.items()}
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
