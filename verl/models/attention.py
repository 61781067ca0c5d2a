"""Our attention, registered with transformers under one name; a layout says what it means.

Every model is built with `attn_implementation=ATTENTION` and every forward pass carries a
`layout=` argument, which transformers hands down to each attention layer. The layout knows where
one sequence ends and the next begins and where keys and values are kept: `PackedLayout` for
training, the rollout engine's own for prefill and decode. There is no mask tensor anywhere, so a
mask can neither be forgotten nor leak from one packed sequence into its neighbour.

Where ranks shard the heads of a layer, query heads are split evenly, in order. Key heads go with
the queries that use them; where there are fewer of them than ranks, or they do not divide evenly,
several ranks hold the same one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "verl"


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks for besides queries, keys and values."""

    scaling: float
    """Factor on the scores before the softmax."""

    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` tokens before it; None sees all."""

    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""

    sinks: Tensor | None = None
    """One extra score per query head that takes part in the softmax and carries no value."""


class AttentionLayout(ABC):
    """Causal self-attention over tokens that all sequences share one axis for."""

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """(N, heads, head_dim) for a query of that shape and key, value (N, kv_heads, head_dim).

        Token i sees the tokens of its own sequence up to and including itself, no others.
        """


def layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; query, key, value are (1, heads, N, head_dim)."""
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} ran without layout=...; this model was prepared for packed "
            "sequences: call it through verl.models.forward, or load it anew for other uses"
        )
    if attention_mask is not None or query.shape[0] != 1 or dropout:
        raise ValueError(
            f"{type(module).__name__} got mask={attention_mask is not None}, "
            f"batch={query.shape[0]}, dropout={dropout}; packed input has no mask, one row "
            "and no dropout"
        )
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # Not `x[0]`, whose gradient is a copy into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (N, heads, head_dim)
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    return layout.attend(layer, q, k, v, options)[None], None


# There is no function for masks under this name: transformers then makes none. To make one it would
# read the positions, and wait for the device in every pass.
AttentionInterface.register(ATTENTION, layout_attention)


def heads_per_rank(num_heads: int, num_ranks: int, option: str) -> int:
    """Query heads of one rank; `option` is the setting that asks for so many ranks."""
    if num_heads % num_ranks:
        choices = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"{option} ({num_ranks}) must divide the {num_heads} attention heads of the model, "
            f"which are sharded across ranks; possible are {choices}"
        )
    return num_heads // num_ranks


def key_head_repeats(num_key_heads: int, num_ranks: int) -> int:
    """How often each key head is repeated, side by side, so that all ranks get equally many.

    Queries still meet their own keys: the heads of one rank are consecutive before and after.
    """
    return num_ranks // gcd(num_key_heads, num_ranks)


def key_heads_of_rank(num_key_heads: int, num_ranks: int, rank: int) -> list[int]:
    """The key heads, repeats included, that one rank's queries use."""
    repeats = key_head_repeats(num_key_heads, num_ranks)
    per_rank = num_key_heads * repeats // num_ranks
    return [head // repeats for head in range(rank * per_rank, (rank + 1) * per_rank)]
