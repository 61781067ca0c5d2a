"""From a loaded model to one whose adapters are trained."""

import warnings
from copy import deepcopy

from transformers import PreTrainedModel

from verl.models.lora.files import load_adapter, stored_config
from verl.models.lora.layers import (
    ADAPTER,
    START,
    fresh_config,
    inject,
    lora_layers,
    peft_config,
    train_head,
)
from verl.models.lora.options import LoraOptions
from verl.utils.fs import copy_to_local


def add_lora(
    model: PreTrainedModel, options: LoraOptions, *, seed: int = 0, keeps_start: bool = False
) -> PreTrainedModel:
    """Freeze `model` and give it adapters to train, in place: new ones, or those stored.

    `keeps_start` keeps a frozen copy of the stored adapter, for `as_started`; new adapters need
    none, because they start as nothing.
    """
    if options.adapter_path is None:
        inject(model, fresh_config(model, options), seed=seed)
        train_head(model)
        return model.eval()
    folder = copy_to_local(options.adapter_path)
    config = stored_config(folder, options)
    config.base_model_name_or_path = model.config.name_or_path
    inject(model, config, seed=seed)
    load_adapter(model, folder)
    if keeps_start:
        keep_start(model)
    return model.eval()


def keep_start(model: PreTrainedModel) -> None:
    """Add a frozen copy of the adapter as it is now."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second is meant
        inject(model, deepcopy(peft_config(model)), seed=0, name=START)
    for layer in lora_layers(model).values():
        for factor in (layer.lora_A, layer.lora_B):
            factor[START] = deepcopy(factor[ADAPTER])
        layer.set_adapter(ADAPTER)  # peft runs and trains the last one that was added
