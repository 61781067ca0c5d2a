"""Low-rank adapters (arXiv:2106.09685): small matrices trained in place of the weights beside them.

    y = W x + (alpha / rank) B A x        A random, B zero, so training starts from the base model

peft puts its layers into the Hugging Face module in place, so packing, attention and the output
head see the model they know, and only the adapters ask for gradients. On disk an adapter is a
folder in peft's own format; `merged_copy` is the model without adapters that computes the same.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.utils.import_utils import require

ADAPTER = "default"
ADAPTER_FOLDER = "lora_adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """What the adapters look like."""

    rank: int
    alpha: int = 16
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: names, a regular expression, or `all-linear`."""

    exclude_modules: str | list[str] | None = None


def add_lora(model: PreTrainedModel, options: LoraOptions, *, seed: int = 0) -> PreTrainedModel:
    """Freeze `model` and give it fresh adapters, in place; the same ones for the same seed."""
    peft = require("peft", "peft")
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=options.target_modules,
        exclude_modules=options.exclude_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.inject_adapter_in_model(config, model)
    refuse_unknown_layers(model)
    return model.eval()


def has_lora(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def refuse_unknown_layers(model: PreTrainedModel) -> None:
    """Adapters go on linear layers inside the model; its output layer stays as it is."""
    for name, layer in lora_layers(model).items():
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ValueError(
                f"target_modules puts an adapter on {name}, which is "
                f"{type(layer.get_base_layer()).__name__}; only linear layers can have one: name "
                "them in target_modules, for example [q_proj,k_proj,v_proj,o_proj]"
            )
        if layer is model.get_output_embeddings():
            raise ValueError(
                f"target_modules puts an adapter on {name}, the output layer, whose weight is "
                "read directly; leave it out (all-linear does)"
            )


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    kind = require("peft.tuners.lora", "peft").LoraLayer
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' weights under the names that peft gives them on disk."""
    return {
        f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER}', '')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }


def save_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(peft_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    weights = {name: weight.contiguous() for name, weight in adapter_weights(model).items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


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


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with every adapter added to its weight; what has none shares its storage."""
    weights = {
        name.replace(".base_layer", ""): weight
        for name, weight in model.state_dict().items()
        if not is_adapter(name)
    }
    for name, layer in lora_layers(model).items():
        base = layer.get_base_layer().weight
        merged = base.float() + layer.get_delta_weight(ADAPTER).float()
        weights[f"{name}.weight"] = merged.to(base.dtype)
    with torch.device("meta"):
        copy = type(model)(deepcopy(model.config))
    copy.load_state_dict(weights, assign=True)
    for name, buffer in model.named_buffers():  # a state has none that can be computed anew
        owner, _, leaf = name.replace(".base_layer", "").rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = buffer
    copy.tie_weights()
    if model.can_generate():
        copy.generation_config = model.generation_config
    return copy.eval()


def peft_config(model: nn.Module) -> Any:
    """What peft left on the model it changed."""
    return vars(model)["peft_config"][ADAPTER]


def shape_of(weights: dict[str, Tensor], name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "missing"
