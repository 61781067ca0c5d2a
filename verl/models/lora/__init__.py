"""Low-rank adapters (arXiv:2106.09685): small matrices trained in place of the weights beside them.

    y = W x + (alpha / rank) B A x        A random, B zero, so training starts from the base model

peft puts its layers into the Hugging Face module in place, so packing, attention and the output
head see the model they know, and only the adapters ask for gradients.
"""

from verl.models.lora.adapt import add_lora
from verl.models.lora.files import ADAPTER_FOLDER, adapter_weights, load_adapter, save_adapter
from verl.models.lora.layers import (
    as_started,
    has_lora,
    is_adapter,
    lora_layers,
    without_adapters,
)
from verl.models.lora.merge import hf_weights, merged_copy
from verl.models.lora.options import LoraOptions, lora_options

__all__ = [
    "ADAPTER_FOLDER",
    "LoraOptions",
    "adapter_weights",
    "add_lora",
    "as_started",
    "has_lora",
    "hf_weights",
    "is_adapter",
    "load_adapter",
    "lora_layers",
    "lora_options",
    "merged_copy",
    "save_adapter",
    "without_adapters",
]
