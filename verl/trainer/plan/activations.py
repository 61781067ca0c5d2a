"""How much memory a forward or backward pass takes on one device: an estimate in closed form.

Per token of a micro-batch, with b bytes in the compute dtype, h hidden, i inner units and q, k the
width of queries and keys:

    one layer             a = b * (5*h + 2*q + 2*k + 3*i)
    kept for backward     L * a, or L * b*h when activations are computed again

The output layer runs on response tokens, whose hidden states are copied, with V logits each in
chunks of `chunk_rows` (`verl.models.head`). While a chunk is computed the one before it still
exists. A training pass keeps the logits for the backward pass as far as a sixteenth of the device
goes, and sums the gradient of the layer in fp32; only then do the layers take their turn, so the
larger of both counts. On a CPU plain torch makes copies in fp32 instead: 4*V bytes for each of
`CPU_CHUNK` tokens to score, 8*V to train.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.roles import data_parallel_size, engine_of, ranks_per_sequence, uses_lora
from verl.trainer.plan.shape import ModelShape

FULL_DTYPES = ("float32", "fp32")
CPU_CHUNK = 1024
WORKSPACE_ELEMENTS = 7 << 26
ROW_MULTIPLE = 256
DEVICE_BYTES = 80 << 30
"""Memory of a device, which the plan cannot see; it decides how many logits are kept."""

KEPT_BYTES = DEVICE_BYTES // 16


@dataclass(frozen=True)
class PassBytes:
    """The peak of a pass over the largest micro-batch, beside weights and gradients."""

    scoring: float
    training: float
    value_training: float
    """Of a critic, which has one output instead of logits."""


def pass_bytes(config: Any, shape: ModelShape) -> PassBytes:
    compute = compute_bytes(config, engine_of(config, "actor_rollout_ref"))
    trained = tokens_per_micro_batch(config, config.actor_rollout_ref.actor, "ppo_")
    scored = tokens_per_micro_batch(config, config.actor_rollout_ref.rollout, "log_prob_")
    layer = layer_bytes(shape, compute)
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing
    kept = trained * shape.layers * (compute * shape.hidden if recomputes else layer)
    again = trained * layer if recomputes else 0.0
    if config.trainer.device == "cpu":
        scoring = scored * layer + 4 * shape.vocab * min(scored, CPU_CHUNK)
        head = 8 * shape.vocab * min(trained, CPU_CHUNK)
        return PassBytes(scoring, kept + again + head, kept + again)
    share = config.data.max_response_length
    share /= config.data.max_prompt_length + config.data.max_response_length
    chunks = chunk_bytes(shape, compute, scored * share)
    states = compute * shape.hidden * scored * (1 + share)
    scoring = max(scored * layer, chunks + states)
    logits = compute * shape.vocab * trained * share
    if logits > KEPT_BYTES:
        logits = KEPT_BYTES + chunk_bytes(shape, compute, trained * share)
    head = logits + compute * shape.hidden * trained * (1 + 2 * share)
    if not uses_lora(config):
        head += 4 * shape.embedding_params
        again += compute * shape.embedding_params if shape.is_tied else 0  # waits for the other's
    return PassBytes(scoring, kept + max(head, again), kept + again)


def prefill_bytes(config: Any, shape: ModelShape) -> float:
    """The largest prefill of the built-in engine, and the logits of a step of all rows."""
    rollout = config.actor_rollout_ref.rollout
    tokens = min(rollout.max_num_batched_tokens, 32768)
    return tokens * layer_bytes(shape, 2) + 2 * shape.vocab * rollout.max_num_seqs


def layer_bytes(shape: ModelShape, compute: int) -> float:
    """Of one token in one layer."""
    return compute * (5 * shape.hidden + shape.attention_width + 3 * active_inner(shape))


def chunk_rows(vocabulary: int) -> int:
    """Response tokens whose logits are computed at once where kernels run."""
    rows = WORKSPACE_ELEMENTS // vocabulary
    return max(16, rows - rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else rows)


def chunk_bytes(shape: ModelShape, compute: int, num_rows: float) -> float:
    return compute * shape.vocab * min(num_rows, 2 * chunk_rows(shape.vocab))


def tokens_per_micro_batch(config: Any, section: Any, prefix: str) -> float:
    """Tokens of the largest micro-batch on one device."""
    is_training = prefix == "ppo_"
    engine = engine_of(config, "actor_rollout_ref")
    if section["use_dynamic_bsz" if is_training else f"{prefix}use_dynamic_bsz"]:
        return section[f"{prefix}max_token_len_per_gpu"]
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = section[f"{prefix}micro_batch_size_per_gpu"]
    n = config.actor_rollout_ref.rollout.n
    per_rank = config.data.train_batch_size * n // data_parallel_size(config)
    return min(rows, max(1, per_rank)) * longest / ranks_per_sequence(engine)


def active_inner(shape: ModelShape) -> int:
    """Inner units that one token passes through in a layer."""
    if not shape.experts:
        return shape.inner
    return shape.experts_per_token * shape.expert_inner + shape.shared_inner


def compute_bytes(config: Any, engine: Any) -> int:
    """Bytes of a number in a pass: `auto` is bf16 on an accelerator; on a CPU all is fp32."""
    if config.trainer.device == "cpu":
        return 4
    return 4 if engine.dtype in FULL_DTYPES else 2
