"""A policy with LoRA and an engine that takes adapters: the adapter alone is sent.

The engine reads the base weights from disk once. An update is then a few megabytes instead of the
whole model, and the engine computes y = W x + (alpha / rank) B A x as training does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.models.lora import ADAPTER, CONFIG_FILE, is_adapter, peft_config


def adapter_config(module: PreTrainedModel) -> dict[str, Any]:
    """What peft writes into `adapter_config.json`."""
    with TemporaryDirectory() as folder:
        peft_config(module).save_pretrained(folder)
        return json.loads((Path(folder) / CONFIG_FILE).read_text())


@torch.no_grad()
def adapter_tensors(
    module: PreTrainedModel, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The adapter under training, whole; ranks that divide it must all go through it."""
    for name, weight in module.named_parameters():
        if is_adapter(name) and f".{ADAPTER}." in name:  # else a frozen one, or a base weight
            weight = weight.detach().to(device, dtype)
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight
