"""Packed attention and the norm, as megatron-core builds them into its layers.

Queries, keys and values arrive rotated, as (tokens, 1, heads, size).
Which tokens belong together is in `PackedRows`, which megatron-core hands down to each layer: the
layout is the one our own engines use, so kernels and numbers are the same. With context
parallelism it is `UlyssesLayout`: a rank has some of the tokens everywhere but here, where it has
some of the heads of all tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from verl.models.attention import AttentionLayout, AttentionOptions


@dataclass
class PackedRows(PackedSeqParams):
    """The layout of the rows in a pass.

    The format is not megatron-core's `thd`: it would rotate and reshape by sequences, which
    positions per token make unnecessary.
    """

    qkv_format: str = "sbhd"
    layout: AttentionLayout | None = None
    positions: Tensor | None = None
    """(tokens,) of each in its own sequence, where layers rotate by themselves."""

    balance: Any = None
    """`balance.Balance` of a training pass, for the routers of a model with experts."""


class PackedAttention(MegatronModule):
    """Causal attention inside each of the packed sequences."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        """The arguments of megatron-core's own; dropout is off and the rest is in the layout."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """(tokens, 1, heads * size) for a query of (tokens, 1, heads, size), or without the 1 from
        latent attention."""
        assert isinstance(packed_seq_params, PackedRows), "every pass says how its rows are packed"
        layout = packed_seq_params.layout
        assert layout is not None
        assert attention_mask is None
        assert attention_bias is None
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        output = layout.attend(self.layer_number, q, k, v, AttentionOptions(scaling=scale))
        return output.flatten(1).unsqueeze(1)


def rotary_angles(frequencies: Tensor, positions: Tensor) -> Tensor:
    """(tokens, 1, 1, size): by how much each pair of numbers of each token is rotated."""
    angles = torch.outer(positions.float(), frequencies.to(positions.device))
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]


class LatentRotary(nn.Module):
    """The angles of latent attention, whose layers rotate by themselves.

    megatron-core counts positions up to a length; here what it asks for as the length are the
    positions of the packed tokens. `factor` scales cosines and sines (YaRN).
    """

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        super().__init__()
        self.frequencies, self.factor = frequencies, factor

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Tensor, config: Any, packed: PackedRows
    ) -> Tensor:
        assert packed.positions is not None
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False) -> tuple[Tensor, float]:
        """(tokens, 1, size) angles, to broadcast over heads."""
        return rotary_angles(self.frequencies, positions).squeeze(1), self.factor


class Norm(nn.RMSNorm):
    """Root-mean-square norm whose weight says whether ranks see different tokens: megatron-core's
    own refuses sequence parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
