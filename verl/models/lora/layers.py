"""Putting adapters into a model, and running it without them or as it started.

peft replaces linear layers in place by layers that hold the linear one and, by name, any number of
adapters. Here there is one that is trained, and beside it a frozen copy of the adapter that a run
started from, if it started from one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.models.lora.options import ALL_LINEAR, LoraOptions
from verl.utils.import_utils import require

ADAPTER = "default"
"""The name of the adapter that is trained; peft's own default."""

START = "start"
"""The name of the frozen copy of the adapter that training started from."""

HEAD = "score"
"""The layer of a value model that has one output; it starts at zero and is trained whole."""


def inject(model: PreTrainedModel, config: Any, *, seed: int, name: str = ADAPTER) -> None:
    """Freeze `model` and give it fresh adapters, in place; the same ones for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        require("peft", "peft").inject_adapter_in_model(config, model, adapter_name=name)
    refuse_unknown_layers(model)


def fresh_config(model: PreTrainedModel, options: LoraOptions) -> Any:
    """peft's configuration of new adapters."""
    is_value_model = model.get_output_embeddings() is None
    return require("peft", "peft").LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.use_rslora,
        target_modules=options.target_modules,
        exclude_modules=[HEAD] if is_value_model else options.exclude_modules,
        task_type="TOKEN_CLS" if is_value_model else "CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
    )


def train_head(model: PreTrainedModel) -> None:
    """Let a value model's head learn too; peft's files say so in their own way."""
    if model.get_output_embeddings() is None:
        model.get_submodule(HEAD).requires_grad_(True)
        peft_config(model).modules_to_save = [HEAD]


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
                f"read directly; leave it out ({ALL_LINEAR} does)"
            )


def has_lora(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    kind = require("peft.tuners.lora", "peft").LoraLayer
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}


def peft_config(model: nn.Module) -> Any:
    """What peft left on the model it changed."""
    return vars(model)["peft_config"][ADAPTER]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run as the base model while the context lasts; no change when there are no adapters."""
    with _running_as(model, None):
        yield


@contextmanager
def as_started(model: nn.Module) -> Iterator[None]:
    """Run as the policy that training started from: the base, or with the adapter it came with."""
    is_kept = any(f".{START}." in name for name, _ in model.named_parameters())
    with _running_as(model, START if is_kept else None):
        yield


@contextmanager
def _running_as(model: nn.Module, adapter: str | None) -> Iterator[None]:
    if not has_lora(model):
        yield
        return
    layers = list(lora_layers(model).values())
    # peft lets what it switches on be trained, and freezes what it switches off.
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for layer in layers:
            if adapter is None:
                layer.enable_adapters(False)
            else:
                layer.set_adapter(adapter)
        yield
    finally:
        for layer in layers:
            layer.set_adapter(ADAPTER)
            layer.enable_adapters(True)
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
