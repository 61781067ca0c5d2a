"""How many operations a training step takes, from the model's shape, and what the device promises.

For a decoder with N weights that a token is multiplied with, a step forwards and backwards costs

    6 N tokens  +  3 * sum over sequences and layers of pairs * 2 * heads * (d_qk + d_v)

where `pairs` is how many (query, key) pairs attention looks at: s^2 / 2 for a causal layer on s
tokens, w s - w^2 / 2 for one with a sliding window w < s. N has the output matrix in it and of the
experts those a token is sent to. The embedding is looked up, not multiplied with, so it does not
count, whether it is the output matrix as well or not. A vision tower and recomputed activations are
not counted either; the output matrix counts for all tokens, also where it runs on responses only.
"""

import logging
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from verl.utils.device import get_device_name, get_torch_device

logger = logging.getLogger(__name__)

# Dense bfloat16 peaks in FLOP/s from data sheets, by a pattern for a word of the device's name.
_PEAK: dict[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
    "H100 PCIe": 756e12,
    "(H100|H200|GH200|H800)": 989e12,
    "H20": 148e12,
    "(A100|A800)": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "A40": 149.7e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    r"Ascend910B\d?": 354e12,
}
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

# Two matrices instead of three in the feed-forward block.
_UNGATED = {"apertus", "gpt_neox", "nemotron", "phi", "starcoder2"}
_QUADRATIC = {"full_attention", "sliding_attention", "chunked_attention"}


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """The device's promised bfloat16 peak, in TFLOP/s by default; infinite if it is not known."""
    if unit not in _UNITS:
        raise ValueError(f"unit is {unit!r}; it must be one of: {', '.join(map(repr, _UNITS))}")
    return _peak(device_name or _current_device()) / _UNITS[unit]


def _current_device() -> str:
    return "cpu" if get_device_name() == "cpu" else get_torch_device().get_device_name()


@cache
def _peak(device_name: str) -> float:
    for pattern, peak in _PEAK.items():
        if re.search(rf"(?<!\w){pattern}(?!\w)", device_name, re.IGNORECASE):
            return peak
    if device_name != "cpu":  # nobody publishes a peak for those
        _warn_once(f"the peak speed of the device {device_name!r} is not known; no utilisation")
    return math.inf


class FlopsCounter:
    """`FlopsCounter(model.config)` estimates speed from sequence lengths and seconds."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def estimate_flops(
        self, batch_seqlens: Sequence[int], delta_time: float, **kwargs: Any
    ) -> tuple[float, float]:
        """(achieved, promised) TFLOP/s of training on these sequences in `delta_time` seconds.

        A model whose shape cannot be read gives NaN and one warning: training goes on without it.
        `kwargs` may hold `images_seqlens`, as batches with images do; images are not counted.
        """
        if any(kwargs.values()):
            _warn_once(f"{', '.join(kwargs)}: only the language model's operations are counted")
        return self.step_flops(batch_seqlens) / delta_time / 1e12, get_device_flops("T")

    def utilisation(
        self, batch_seqlens: Sequence[int], seconds: float, *, passes: float = 1.0
    ) -> float | None:
        """The share of the device's peak that `passes` training passes over these rows reached.

        A forward pass alone is a third of a pass. None where the peak or the model is not known.
        """
        share = passes * self.step_flops(batch_seqlens) / seconds / get_device_flops("")
        return share if share > 0 else None  # NaN: unknown model; 0: unknown peak

    def step_flops(self, batch_seqlens: Sequence[int]) -> float:
        """Operations of one forward and backward pass; a forward pass alone takes a third."""
        try:
            shape = _Shape(self.config)
        except (AttributeError, _UnknownShapeError) as problem:
            _warn_once(f"operations of this model are not counted: {problem}")
            return math.nan
        linear = 6 * shape.num_weights * sum(batch_seqlens)
        return linear + 3 * sum(map(shape.attention_flops, batch_seqlens))


class _UnknownShapeError(Exception):
    pass


class _Shape:
    """The sizes in a Hugging Face configuration that decide the number of operations."""

    def __init__(self, config: Any) -> None:
        config = _read(config, "text_config", None) or config
        self.config = config
        self.hidden: int = config.hidden_size
        self.num_heads: int = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.is_latent = bool(_read(config, "kv_lora_rank", None))
        if self.is_latent:
            self.d_qk: int = config.qk_nope_head_dim + config.qk_rope_head_dim
            self.d_v: int = config.v_head_dim
        else:
            self.d_qk = self.d_v = _read(config, "head_dim", None) or self.hidden // self.num_heads
        self.windows = self._windows()
        layers = self.num_layers * self._attention_weights() + self._feed_forward_weights()
        self.num_weights: int = config.vocab_size * self.hidden + layers

    def attention_flops(self, seqlen: int) -> float:
        """Forward operations of query times key and probability times value, over all layers."""
        pairs = sum(_causal_pairs(seqlen, window) for window in self.windows)
        return pairs * 2 * self.num_heads * (self.d_qk + self.d_v)

    def _windows(self) -> list[int | None]:
        """One entry per layer; None sees everything before it."""
        window = _read(self.config, "sliding_window", None)
        kinds = _read(self.config, "layer_types", None)
        if kinds is None:
            is_used = _read(self.config, "use_sliding_window", True)
            return [window if is_used else None] * self.num_layers
        if not _QUADRATIC.issuperset(kinds):
            raise _UnknownShapeError(f"layer types {sorted(set(kinds) - _QUADRATIC)}")
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def _attention_weights(self) -> int:
        config, heads = self.config, self.num_heads
        if not self.is_latent:
            kv_heads = _read(config, "num_key_value_heads", None) or heads
            return self.hidden * self.d_qk * (2 * heads + 2 * kv_heads)
        rank = _read(config, "q_lora_rank", None)
        query = (
            rank * (self.hidden + heads * self.d_qk) if rank else self.hidden * heads * self.d_qk
        )
        latent = self.hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        expand = config.kv_lora_rank * heads * (config.qk_nope_head_dim + self.d_v)
        return query + latent + expand + heads * self.d_v * self.hidden

    def _feed_forward_weights(self) -> int:
        """Over all layers; of the experts, those one token is sent to."""
        config = self.config
        matrices = 2 if _read(config, "model_type", "") in _UNGATED else 3
        num_experts = next(filter(None, (_read(config, name, None) for name in _NUM_EXPERTS)), None)
        if num_experts is None:
            return self.num_layers * matrices * self.hidden * config.intermediate_size
        width = _read(config, "moe_intermediate_size", None) or config.intermediate_size
        shared = _read(config, "shared_expert_intermediate_size", None) or 0
        shared += width * (_read(config, "n_shared_experts", None) or 0)
        per_token = matrices * (config.num_experts_per_tok * width + shared) + num_experts
        num_sparse = sum(map(self._is_sparse, range(self.num_layers)))
        total = num_sparse * self.hidden * per_token
        if num_sparse < self.num_layers:
            num_dense = self.num_layers - num_sparse
            total += num_dense * matrices * self.hidden * config.intermediate_size
        return total

    def _is_sparse(self, layer: int) -> bool:
        first = _read(self.config, "first_k_dense_replace", None) or 0
        every = _read(self.config, "decoder_sparse_step", None) or 1
        dense = _read(self.config, "mlp_only_layers", None) or ()
        return layer >= first and (layer + 1) % every == 0 and layer not in dense


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _causal_pairs(seqlen: int, window: int | None) -> float:
    if window is None or window >= seqlen:
        return seqlen**2 / 2
    return window * seqlen - window**2 / 2


def _read(config: Any, name: str, default: Any) -> Any:
    """Configurations of different models have different fields; this is where that is allowed."""
    try:
        return getattr(config, name)
    except AttributeError:
        return default


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
