"""Small sets of weights, and a receiver with storage for them."""

import torch
from torch import Tensor

from verl.workers.weight_sync import WeightReceiver

Weights = dict[str, Tensor]


def small_weights(seed: int = 0) -> Weights:
    """Three number formats, one scalar, one tensor without elements; 155 bytes in all."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(6, 4, generator=generator),
        "layer.weight": torch.randn(5, 5, generator=generator).bfloat16(),
        "layer.mask": torch.rand(5, generator=generator) > 0.5,
        "scale": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 3),
    }


def receiver_for(weights: Weights) -> tuple[Weights, WeightReceiver]:
    """Tensors of the same kinds, all zero, and the receiver that fills them."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return targets, WeightReceiver(targets)


def are_equal(left: Weights, right: Weights) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)
