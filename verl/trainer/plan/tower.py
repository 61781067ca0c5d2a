"""The parameters of a vision tower and of what joins it to the language model, from `config.json`.

A tower embeds patches and has D layers of width v with m inner units, all with biases:

    layer = 4*v*v + 4*v + mlp + norms        mlp = 2*v*m + m + v, gated 3*v*m + 2*m + v

A merger makes one token of w = v * merge^2 numbers (Qwen): w*w + w + w*h + h, and a norm.
"""

from collections.abc import Mapping
from typing import Any


def tower_params(described: Mapping[str, Any]) -> int:
    """0 for a model without one, or of a family that images are not given to."""
    count = {
        "qwen2_vl": qwen2,
        "qwen2_5_vl": qwen2_5,
        "qwen3_vl": qwen3,
        "idefics3": idefics3,
    }.get(str(described["model_type"]))
    return 0 if count is None else count(described, described["vision_config"])


def layer(width: int, inner: int, *, num_matrices: int = 2, norm: int = 2) -> int:
    """`norm` is 2 with biases, 1 without."""
    mlp = num_matrices * width * inner + (num_matrices - 1) * inner + width
    return 4 * width * (width + 1) + mlp + 2 * norm * width


def merger(width: int, merged: int, hidden: int, norm: int) -> int:
    return norm * width + merged * (merged + 1) + (merged + 1) * hidden


def patches(vision: Mapping[str, Any], width: int, default_size: int) -> int:
    """The weight of the layer that embeds them."""
    channels = vision.get("in_channels") or vision.get("in_chans") or 3
    size = vision.get("patch_size") or default_size
    return channels * (vision.get("temporal_patch_size") or 2) * size * size * width


def merged_width(vision: Mapping[str, Any], width: int) -> int:
    return width * (vision.get("spatial_merge_size") or 2) ** 2


def qwen2(described: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    width, hidden = vision["embed_dim"], vision["hidden_size"]
    inner = int(width * (vision.get("mlp_ratio") or 4))
    layers = vision["depth"] * layer(width, inner)
    return (
        patches(vision, width, 14) + layers + merger(width, merged_width(vision, width), hidden, 2)
    )


def qwen2_5(described: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    width, hidden = vision["hidden_size"], vision["out_hidden_size"]
    layers = vision["depth"] * layer(width, vision["intermediate_size"], num_matrices=3, norm=1)
    return (
        patches(vision, width, 14) + layers + merger(width, merged_width(vision, width), hidden, 1)
    )


def qwen3(described: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    width, hidden = vision["hidden_size"], vision["out_hidden_size"]
    merged = merged_width(vision, width)
    stacks = len(vision["deepstack_visual_indexes"]) * merger(merged, merged, hidden, 2)
    layers = vision["depth"] * layer(width, vision["intermediate_size"])
    embedded = patches(vision, width, 16) + width + vision["num_position_embeddings"] * width
    return embedded + layers + merger(width, merged, hidden, 2) + stacks


def idefics3(described: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    width, size = vision["hidden_size"], vision["patch_size"]
    positions = (vision["image_size"] // size) ** 2
    embedded = width * (3 * size * size + 1 + positions)
    layers = vision["num_hidden_layers"] * layer(width, vision["intermediate_size"])
    joined = width * (described.get("scale_factor") or 2) ** 2
    return embedded + layers + 2 * width + joined * described["text_config"]["hidden_size"]
