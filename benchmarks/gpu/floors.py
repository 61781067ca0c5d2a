"""The operations and bytes that cannot be avoided. Arithmetic only.

Only products with matrices count as operations: looking a token up in the embedding is no product,
and the output layer runs where a response token is predicted, nowhere else. With W the weights of
all layers, H those of the output layer, and `pairs` the (query, key) pairs that attention looks at:

    forward  = 2 W tokens + 2 H predicted tokens + 4 layers heads head_dim pairs
    training = 3 forward                     (what is computed again in the backward pass is extra)

A decode step of B sequences takes at least, one after the other at the measured ceilings,

    products   the larger of 2 (W + H) B operations and reading W + H once
    keys       reading the keys and values of every sequence; a prompt once for all its samples
    logits     reading them once
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.workload import Workload

TRAINING_FORMULA = (
    "3 * (2 W tokens + 2 H response tokens + 4 layers heads head_dim pairs); W: weights of the "
    "layers' matrices, H: vocabulary * hidden (the embedding is a lookup), pairs: causal; "
    "with shared prefixes a prompt's tokens and pairs count once per group"
)
DECODE_FORMULA = (
    "per step max(2 (W + H) B / matmul, bytes(W + H) / copy) + (keys and values of B responses so "
    "far and of each prompt once) / copy + B V logits / copy; plus the prefill's operations / "
    "matmul; summed, not overlapped"
)


@dataclass(frozen=True)
class Counts:
    """What the shape of a decoder says about one token."""

    layer_weights: int
    head_weights: int
    vocabulary: int
    pair_flops: int
    """Forward operations for one query and one key, over all heads and layers."""

    kv_bytes: int
    """Keys and values of one token over all layers."""

    bytes_per_number: int

    @classmethod
    def of(cls, config: Any, bytes_per_number: int = 2) -> "Counts":
        hidden, layers = config.hidden_size, config.num_hidden_layers
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = hidden // heads
        attention = hidden * width * (2 * heads + 2 * kv_heads)
        return cls(
            layer_weights=layers * (attention + 3 * hidden * config.intermediate_size),
            head_weights=hidden * config.vocab_size,
            vocabulary=config.vocab_size,
            pair_flops=4 * layers * heads * width,
            kv_bytes=layers * 2 * kv_heads * width * bytes_per_number,
            bytes_per_number=bytes_per_number,
        )


def causal_pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


def forward_flops(counts: Counts, work: Workload, *, shares_prefix: bool = False) -> float:
    """Operations of one pass over all rows, log-probabilities of responses included."""
    prompt, response, times = work.prompt_tokens, work.new_tokens, work.sequences
    prompt_times = work.prompts if shares_prefix else times
    tokens = prompt_times * prompt + times * response
    pairs = prompt_times * causal_pairs(prompt)
    pairs += times * (response * prompt + causal_pairs(response))
    head = 2 * counts.head_weights * times * response
    return 2 * counts.layer_weights * tokens + head + counts.pair_flops * pairs


def training_flops(counts: Counts, work: Workload, *, shares_prefix: bool = False) -> float:
    """Operations of a forward and backward pass over all rows."""
    return 3 * forward_flops(counts, work, shares_prefix=shares_prefix)


def decode_floor(
    counts: Counts, work: Workload, *, matmul_tflops: float, copy_tb_per_s: float
) -> dict[str, float]:
    """Seconds by cause for generating all of `work`; the first token comes with the prompt."""
    flops, bandwidth = matmul_tflops * 1e12, copy_tb_per_s * 1e12
    batch, steps = work.sequences, work.new_tokens - 1
    weights = counts.layer_weights + counts.head_weights
    products = max(2 * weights * batch / flops, weights * counts.bytes_per_number / bandwidth)
    kv_tokens = batch * causal_pairs(steps) + steps * work.prompts * work.prompt_tokens
    logits = steps * batch * counts.vocabulary * counts.bytes_per_number
    prompt_tokens = work.prompts * work.prompt_tokens
    prefill = 2 * counts.layer_weights * prompt_tokens + 2 * counts.head_weights * work.prompts
    prefill += counts.pair_flops * work.prompts * causal_pairs(work.prompt_tokens)
    floor = {
        "prefill": prefill / flops,
        "products": steps * products,
        "keys": kv_tokens * counts.kv_bytes / bandwidth,
        "logits": logits / bandwidth,
    }
    return {**floor, "total": sum(floor.values())}
