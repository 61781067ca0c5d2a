"""The same model without adapters: every adapter added to the weight beside it.

W' = W + scale B A        in fp32, then rounded to the dtype of W
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.lora.layers import ADAPTER, has_lora, is_adapter, lora_layers

BASE = ".base_layer"


@torch.no_grad()
def hf_weights(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, adapters merged; one at a time.

    `parameters` are the model's own by name, in any order; give them where the model holds only
    shards. What has no adapter is passed on as it is.
    """
    parameters = parameters or model.named_parameters()
    if not has_lora(model):
        yield from parameters
        return
    scales = {name: layer.scaling[ADAPTER] for name, layer in lora_layers(model).items()}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in scales}
    for name, weight in parameters:
        layer, _, part = name.partition(".lora_")
        if is_adapter(name):
            if f".{ADAPTER}." not in name:
                continue  # a frozen one
            parts[layer][part[0]] = weight
        elif name.endswith(f"{BASE}.weight"):
            layer = name.removesuffix(f"{BASE}.weight")
            parts[layer]["W"] = weight
        else:
            yield name.replace(BASE, ""), weight
            continue
        if len(parts[layer]) == 3:
            yield f"{layer}.weight", merge(**parts.pop(layer), scale=scales[layer])


def merge(*, W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    return (W.float() + scale * (B.float() @ A.float())).to(W.dtype)


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with every adapter added to its weight; what has none shares its storage."""
    weights = dict(hf_weights(model, model.state_dict().items()))
    with torch.device("meta"):
        copy = type(model)(deepcopy(model.config))
    copy.load_state_dict(weights, assign=True)
    for name, buffer in model.named_buffers():  # a state has none that can be computed anew
        owner, _, leaf = name.replace(BASE, "").rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = buffer
    copy.tie_weights()
    if model.can_generate():
        copy.generation_config = model.generation_config
    return copy.eval()
