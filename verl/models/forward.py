"""One forward pass over packed tokens: ids in, hidden states out."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.attention import ATTENTION, AttentionLayout
from verl.models.exact import ROWS, ExactPackedLayout, exact_capacity
from verl.models.kernels.availability import can_run_triton
from verl.models.packed import PackedLayout
from verl.models.shared_prompts import SharedPrompts, UnfoldedLayout
from verl.models.vision import PlacedFeatures, language_arguments, language_model


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    features: PlacedFeatures | None = None,
) -> Tensor:
    """The last hidden state of each token; (N, hidden) for ids (N,).

    Positions are (N,), or (3, N) with M-RoPE; `features` replace embeddings of image tokens.
    """
    attention = model.config._attn_implementation
    if attention != ATTENTION:
        raise ValueError(
            f"{type(model).__name__} runs {attention!r} attention, which ignores the packed layout "
            "and lets neighbours see each other; load the model with verl.models.loading"
        )
    num_tokens = len(input_ids)
    padding = (0, 0 if exact_capacity(model) is None else -num_tokens % ROWS)
    ids, positions = (F.pad(x, padding).unsqueeze(-2) for x in (input_ids, position_ids))
    module, arguments = model.base_model, {"input_ids": ids}
    if features is not None:
        module, arguments = language_model(model), language_arguments(model, ids, features)
    output = module(position_ids=positions, use_cache=False, layout=layout, **arguments)
    hidden = output.last_hidden_state.squeeze(0)
    if hidden.shape[0] != ids.shape[1]:
        raise ValueError(
            f"{type(model).__name__} gave {hidden.shape[0]} hidden states for {ids.shape[1]} "
            "tokens; log-probabilities would belong to other tokens"
        )
    return hidden[:num_tokens]


def packed_layout(model: PreTrainedModel, parts: Sequence[int] | SharedPrompts) -> AttentionLayout:
    """The layout for whole sequences end to end (their lengths), or for prompts and samples."""
    if exact_capacity(model) is None and can_run_triton(model.device):
        from verl.models.kernel_layout import KernelLayout  # noqa: PLC0415 - needs triton

        return KernelLayout(parts, model.device)
    if isinstance(parts, SharedPrompts):
        inner = packed_layout(model, parts.whole_lengths())
        return UnfoldedLayout(parts, inner, model.device)
    capacity = exact_capacity(model)
    if capacity is not None:
        return ExactPackedLayout(parts, capacity)
    return PackedLayout(parts, model.device)


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """0, 1, 2, ... anew for every sequence; (N,)."""
    return torch.cat([torch.arange(n) for n in lengths] or [torch.arange(0)])
