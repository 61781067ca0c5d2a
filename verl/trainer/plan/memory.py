"""How much memory each phase of a step takes on one device: an estimate in closed form.

Per parameter, with b bytes in the compute dtype and W ranks that share the weights:

    one device     weights b, master copy 4 (unless b is 4), Adam's moments 8, gradients b
    zero1          weights b, master copy and moments 12/W, gradients b
    FSDP           stored weights 4/W (2/W in bf16, then a master copy 4/W), moments 8/W,
                   gradients 4/W, and the gathered weights of two layers and the embedding
    Megatron       weights b, gradients b, master copy and moments 12: dense parts over tensor x
                   pipeline ranks, experts over expert x expert tensor x pipeline ranks; with the
                   distributed optimizer the 12 are over all ranks

Which of the two `fsdp_config.sharding=auto` takes is known where the device is; FSDP is shown.

What passes take is below. On an accelerator libraries keep workspaces for their matrix
products (two of 32 MiB), and the built-in engine makes all slots of its cache at once: one for each
of `rollout.max_num_seqs`, and `SESSION_BYTES` for conversations that wait for their next turn.

Framework overhead and fragmentation come on top; a tenth of the device is a fair allowance.

How much memory a forward or backward pass takes on one device: an estimate in closed form.

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

How long an update of the rollout's weights takes: bytes over the slowest link on their way.

    shared      the engine generates with the trained weights            0
    gathered    every rank gets all weights in a ring of all-gathers     bytes / slowest link
    sent        each sending rank serves its share of the engines        bytes * rounds / network

The bandwidths are assumptions, named with the result; measured updates are in docs/weight_sync.md.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.ref import McoreRefConfig
from verl.config.roles import (
    critic_lora_rank,
    data_parallel_size,
    engine_has_whole_weights,
    engine_of,
    is_own_reference,
    needs_critic,
    needs_reference,
    ranks_beside,
    ranks_per_sequence,
    replicas,
    role_ranks,
    rollout_traits,
    shares_weights,
    uses_lora,
    world_size,
)
from verl.trainer.plan.megatron import megatron_layout
from verl.trainer.plan.shape import ModelShape, shape_at

IN_NODE = 150e9
"""Bytes per second of a collective between devices of a node: a third of NVLink's 450 GB/s."""

BETWEEN_NODES = 25e9
"""Bytes per second between two nodes: half of a 400 Gb/s link."""


@dataclass(frozen=True)
class SyncPlan:
    """What one update moves, and how."""

    how: str
    num_bytes: float
    seconds: float


def sync_plan(config: Any, shape: ModelShape) -> SyncPlan:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    is_hybrid = config.actor_rollout_ref.hybrid_engine
    if is_hybrid and rollout.name == "native" and engine_has_whole_weights(config):
        return SyncPlan("the engine generates with the trained weights", 0.0, 0.0)
    num_bytes = shape.params * (4.0 if trainer.device == "cpu" else 2.0)
    is_wide = trainer.nnodes > 1
    link = BETWEEN_NODES if is_wide else IN_NODE
    if is_hybrid:
        how = "gathered tensor by tensor on every rank"
        how += (
            ", handed to the engine's process"
            if not rollout_traits(rollout.name).is_builtin
            else ""
        )
        return SyncPlan(how, num_bytes, num_bytes / link)
    senders = world_size(config)
    rounds = -(-replicas(config) // senders)
    link = BETWEEN_NODES if is_wide or ranks_beside(config) else IN_NODE
    how = f"gathered, then sent by {senders} ranks to {replicas(config)} engines"
    return SyncPlan(how, num_bytes, num_bytes / link * (1 + rounds))


LIBRARY_BYTES = 2 * 32 << 20
SESSION_BYTES = 1 << 30
BUILT_IN_ENGINES = ("native", "native_process")


@dataclass(frozen=True)
class Phase:
    """What lies in memory at the peak of one phase, in bytes."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """The phases of a step; none, and the reason, when the model's shape is not known."""

    shape: ModelShape | None
    reason: str = ""
    phases: list[Phase] = field(default_factory=list)
    sync: SyncPlan | None = None


@dataclass(frozen=True)
class State:
    """What one trained model keeps on a device: bytes at rest, and what an update adds."""

    weights: float
    optimizer: float
    gradients: float
    gathered: float
    idle_weights: float
    idle_optimizer: float


def memory_plan(config: Any) -> MemoryPlan:
    model = config.actor_rollout_ref.model
    shape, reason = shape_at(model.hf_config_path or model.path)
    if shape is None:
        return MemoryPlan(None, reason)
    actor = model_state(config, "actor_rollout_ref", shape, shape.params)
    critic = critic_state(config, shape)
    reference = reference_bytes(config, shape)
    idle_reference = {"reference": reference} if reference else {}
    idle_critic = {"critic": critic.idle_weights + critic.idle_optimizer} if critic else {}
    idle_actor = {"weights": actor.idle_weights, "optimizer": actor.idle_optimizer}
    at_rest = {**idle_actor, **idle_critic, **idle_reference}
    if config.trainer.device != "cpu":
        at_rest["libraries"] = LIBRARY_BYTES
    passes = pass_bytes(config, shape)
    busy = {"weights": actor.weights, "working weights": actor.gathered}
    update = {
        "optimizer": actor.optimizer,
        "gradients": actor.gradients,
        "activations": passes.training,
    }
    beside = at_rest if config.actor_rollout_ref.hybrid_engine else {}  # else on another device
    phases = [
        Phase("load", at_rest),
        Phase("rollout", beside | rollout_bytes(config, shape)),
        Phase("log-prob", at_rest | busy | {"activations": passes.scoring}),
        Phase("update actor", at_rest | busy | update),
    ]
    if critic is not None:
        busy = {"critic": critic.weights + critic.optimizer, "working weights": critic.gathered}
        update = {"gradients": critic.gradients, "activations": passes.value_training}
        phases.append(Phase("update critic", at_rest | busy | update))
    return MemoryPlan(shape, phases=phases, sync=sync_plan(config, shape))


def model_state(config: Any, role: str, shape: ModelShape, params: int) -> State:
    engine, ranks = engine_of(config, role), role_ranks(config, role)
    compute = compute_bytes(config, engine)
    trained = trained_params(config, role, shape, params)
    gathered = 0.0
    stays = role != "critic" and shares_weights(config)
    if not isinstance(engine, FSDPEngineConfig):
        held = megatron_params(config, role, shape, params)
        weights, gradients = compute * held, compute * held
        copies = ranks * held / params if engine.use_distributed_optimizer else 1
        optimizer = 12 * held / copies
    elif ranks == 1 or engine.sharding == "zero1":
        master = 0 if compute == 4 and ranks == 1 else 4
        weights, gradients = compute * params, compute * trained
        optimizer = (master + 8) * trained / ranks
    else:
        shards = engine.fsdp_size if engine.fsdp_size > 0 else ranks
        stored = 4 if engine.model_dtype in FULL_DTYPES else 2
        weights, gradients = stored * params / shards, 4 * trained / shards
        optimizer = (8 + (4 if stored == 2 else 0)) * trained / shards
        whole = params if not engine.reshard_after_forward else 0
        layer = shape.layer_params
        if engine.expert_parallel_size > 1:  # rows travel to the experts, which stay where they are
            layer -= shape.expert_params
            gathered = compute * shape.layers * shape.expert_params / shards if stored == 4 else 0
        gathered += compute * (whole or 2 * layer + shape.embedding_params)
    return State(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        gathered=gathered,
        idle_weights=0.0 if engine.param_offload and not stays else weights,
        idle_optimizer=0.0 if engine.optimizer_offload else optimizer,
    )


def megatron_params(config: Any, role: str, shape: ModelShape, params: int) -> float:
    """Weights on one rank."""
    name = "critic" if role == "critic" else "actor_rollout_ref"
    layout = megatron_layout(config, name)
    sparse = shape.layers - shape.dense_layers if shape.experts else 0
    routed = sparse * shape.expert_params
    dense = (params - routed) / (layout.tensor * layout.pipeline)
    return dense + routed / (layout.expert * layout.expert_tensor * layout.pipeline)


def trained_params(config: Any, role: str, shape: ModelShape, params: int) -> int:
    """All of them, or adapters."""
    if role == "critic":
        rank = critic_lora_rank(config)
        return shape.lora_params(rank) + shape.hidden if rank else params
    model = config.actor_rollout_ref.model
    if not uses_lora(config):
        is_frozen = config.actor_rollout_ref.actor.freeze_vision_tower
        return params - (shape.tower_params if is_frozen else 0)
    on_experts = "experts" in str(model.target_modules)
    return shape.lora_params(model.lora_rank or model.lora.rank, on_experts=on_experts)


def critic_state(config: Any, actor_shape: ModelShape) -> State | None:
    """The value model, taken to have the actor's shape when its own is not here to read."""
    if not needs_critic(config):
        return None
    shape = shape_at(config.critic.model.path)[0] or actor_shape
    return model_state(config, "critic", shape, shape.value_model_params)


def reference_bytes(config: Any, shape: ModelShape) -> float:
    """A frozen copy, sharded like the actor; with LoRA the actor itself serves."""
    if not needs_reference(config) or is_own_reference(config):
        return 0.0
    ref = config.actor_rollout_ref.ref
    engine = ref.megatron if isinstance(ref, McoreRefConfig) else ref.fsdp_config
    if engine.param_offload:
        return 0.0
    ranks = role_ranks(config, "actor_rollout_ref")
    if not isinstance(engine, FSDPEngineConfig):
        held = megatron_params(config, "actor_rollout_ref", shape, shape.params)
        return compute_bytes(config, engine) * held
    whole = compute_bytes(config, engine) * shape.params
    if ranks == 1 or engine.sharding == "zero1":
        return whole
    return whole / (engine.fsdp_size if engine.fsdp_size > 0 else ranks)


def rollout_bytes(config: Any, shape: ModelShape) -> dict[str, float]:
    """The engine's own weights, if it has any, and a KV cache for all sequences it runs at once."""
    rollout = config.actor_rollout_ref.rollout
    size = 4 if config.trainer.device == "cpu" else 2
    tensor = rollout.tensor_model_parallel_size
    parts: dict[str, float] = {}
    is_built_in = rollout.name in ("native", "hf")
    is_apart = not config.actor_rollout_ref.hybrid_engine
    in_fp8 = 0
    if rollout.quantization == "fp8":
        sparse_layers = shape.layers - shape.dense_layers
        in_fp8 = shape.linear_params + shape.expert_params * sparse_layers
    if is_apart or not (is_built_in and engine_has_whole_weights(config)):
        parts["engine weights"] = size * shape.params / tensor
    if rollout_traits(rollout.name).is_builtin:  # beside the weights that they are made from
        parts["fp8 weights"] = in_fp8 / tensor
    else:  # instead of them
        parts["engine weights"] -= (size - 1) * in_fp8 / tensor
    sequences = math.ceil(config.data.train_batch_size * rollout.n / replicas(config))
    running = min(sequences, rollout.max_num_seqs)
    has_kernels = rollout.name in BUILT_IN_ENGINES and config.trainer.device != "cpu"
    if has_kernels:  # all slots at once: graphs remember addresses
        running = rollout.max_num_seqs
        parts["prefill"] = prefill_bytes(config, shape) / tensor
    tokens = running * (rollout.prompt_length + rollout.response_length)
    size = 1 if rollout.kv_cache_dtype == "fp8" else size
    per_token = size * shape.layers * shape.kv_width / tensor
    parts["KV cache"] = tokens * per_token + (SESSION_BYTES if has_kernels else 0)
    return parts


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
