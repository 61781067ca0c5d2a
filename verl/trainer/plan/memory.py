"""How much memory each phase of a step takes on one device: an estimate in closed form.

Per parameter, with b bytes in the compute dtype and W ranks that share the weights:

    one device     weights b, master copy 4 (unless b is 4), Adam's moments 8, gradients b
    zero1          weights b, master copy and moments 12/W, gradients b
    FSDP           stored weights 4/W (2/W in bf16, then a master copy 4/W), moments 8/W,
                   gradients 4/W, and the gathered weights of two layers and the embedding
    Megatron       weights b and gradients 4 over tensor x pipeline ranks, the optimizer over all

Which of the two `fsdp_config.sharding=auto` takes is known where the device is; FSDP is shown.

Per token of a micro-batch, with h hidden, i inner units and q, k the width of queries and keys:

    kept by one layer          a = b * (5*h + 2*q + 2*k + 3*i)
    L layers                   L * a, or L * b*h + a when activations are computed again
    KV cache                   2 * b * L * k
    head                       chunks of tokens, in fp32: 8 * V to train, 4 * V to score

Framework overhead and fragmentation come on top; a tenth of the device is a fair allowance.

The number of parameters follows from a model's `config.json`. A decoder is an embedding, L layers
of attention and MLP, a last norm and a head; families differ in a few terms, which are named below.
With h hidden units, n query heads and k key/value heads of size d, i inner units and V words,

    attention = h*n*d + 2*h*k*d + n*d*h    (+ biases, + norms of queries and keys)
    mlp       = 3*h*i                      (per expert, + h*E for the router of E experts)
    total     = V*h + L*(attention + mlp + norms) + h    (+ V*h unless the head is tied)
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.ref import McoreRefConfig
from verl.config.roles import (
    critic_lora_rank,
    data_parallel_size,
    engine_of,
    is_own_reference,
    needs_critic,
    needs_reference,
    ranks_per_sequence,
    role_ranks,
    shares_weights,
    uses_lora,
)
from verl.trainer.plan.layout import has_whole_weights, replicas

HEAD_CHUNK = 1024  # tokens whose logits exist at the same time
FULL_DTYPES = ("float32", "fp32")
# model_type -> what differs from Llama.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
    "gemma": {"is_tied_by_default": True},
    "gemma2": {"is_tied_by_default": True, "norms_per_layer": 4},
    "gemma3_text": {"is_tied_by_default": True, "norms_per_layer": 4, "has_qk_norm": True},
    "mixtral": {},
    "qwen2_moe": {"has_qkv_bias": True},
    "qwen3_moe": {"has_qk_norm": True},
    "olmoe": {"has_wide_qk_norm": True},
    "smollm3": {"is_tied_by_default": True},
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes that parameter counts and memory estimates need."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_tied: bool
    is_family_known: bool
    norms_per_layer: int = 2
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0

    @property
    def attention_params(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.hidden * (2 * queries + 2 * keys)
        count += (queries + 2 * keys) if self.has_qkv_bias else 0
        count += self.hidden if self.has_output_bias else 0
        count += 2 * self.head_dim if self.has_qk_norm else 0
        count += queries + keys if self.has_wide_qk_norm else 0
        return count

    @property
    def dense_mlp_params(self) -> int:
        bias = 2 * self.inner + self.hidden if self.has_mlp_bias else 0
        return 3 * self.hidden * self.inner + bias

    @property
    def sparse_mlp_params(self) -> int:
        """All experts, the router, and the shared expert with its gate."""
        count = self.experts * (3 * self.hidden * self.expert_inner + self.hidden)
        if self.shared_inner:
            count += 3 * self.hidden * self.shared_inner + self.hidden
        return count

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_params(self) -> int:
        """The largest layer: what FSDP gathers at a time."""
        mlp = self.sparse_mlp_params if self.experts else self.dense_mlp_params
        return self.attention_params + mlp + self.norms_per_layer * self.hidden

    @property
    def body_params(self) -> int:
        """Everything but the head: what a critic or reward model shares with a policy."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        dense = self.layers - sparse
        per_layer = self.attention_params + self.norms_per_layer * self.hidden
        return (
            self.embedding_params
            + self.layers * per_layer
            + dense * self.dense_mlp_params
            + sparse * self.sparse_mlp_params
            + self.hidden
        )

    @property
    def params(self) -> int:
        return self.body_params + (0 if self.is_tied else self.embedding_params)

    @property
    def value_model_params(self) -> int:
        """The body with one output per token instead of a head."""
        return self.body_params + self.hidden

    def lora_params(self, rank: int) -> int:
        """Adapters of this rank on every linear layer of the body (router and head excluded)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        mlp = 3 * (self.hidden + self.inner)
        if self.experts:
            mlp = 3 * (self.hidden + self.expert_inner) * self.experts
        return rank * self.layers * (attention + mlp)


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
    scoring, training = activation_bytes(config, shape)
    busy = {"weights": actor.weights, "working weights": actor.gathered}
    update = {"optimizer": actor.optimizer, "gradients": actor.gradients, "activations": training}
    beside = at_rest if config.actor_rollout_ref.hybrid_engine else {}  # else on another device
    phases = [
        Phase("load", at_rest),
        Phase("rollout", beside | rollout_bytes(config, shape)),
        Phase("log-prob", at_rest | busy | {"activations": scoring}),
        Phase("update actor", at_rest | busy | update),
    ]
    if critic is not None:
        busy = {"critic": critic.weights + critic.optimizer, "working weights": critic.gathered}
        update = {"gradients": critic.gradients, "activations": training}
        phases.append(Phase("update critic", at_rest | busy | update))
    return MemoryPlan(shape, phases=phases)


def shape_at(path: str) -> tuple[ModelShape | None, str]:
    """The shape of the model in a folder, or None and the reason why it is not known."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return None, f"config.json not found at {folder}"
    try:
        return read_model_shape(folder), ""
    except (KeyError, json.JSONDecodeError) as error:
        return None, f"config.json at {folder} does not describe a model we can count ({error!r})"


def model_state(config: Any, role: str, shape: ModelShape, params: int) -> State:
    engine, ranks = engine_of(config, role), role_ranks(config, role)
    compute = compute_bytes(config, engine)
    trained = trained_params(config, role, shape, params)
    gathered = 0.0
    stays = role != "critic" and shares_weights(config)
    if not isinstance(engine, FSDPEngineConfig):
        parts = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
        weights, gradients = compute * params / parts, 4 * trained / parts
        optimizer = 12 * trained / (ranks if engine.use_distributed_optimizer else parts)
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
        gathered = compute * (whole or 2 * shape.layer_params + shape.embedding_params)
    return State(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        gathered=gathered,
        idle_weights=0.0 if engine.param_offload and not stays else weights,
        idle_optimizer=0.0 if engine.optimizer_offload else optimizer,
    )


def trained_params(config: Any, role: str, shape: ModelShape, params: int) -> int:
    """All of them, or adapters."""
    if role == "critic":
        rank = critic_lora_rank(config)
        return shape.lora_params(rank) + shape.hidden if rank else params
    model = config.actor_rollout_ref.model
    return shape.lora_params(model.lora_rank or model.lora.rank) if uses_lora(config) else params


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
        parts = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
        return compute_bytes(config, engine) * shape.params / parts
    whole = compute_bytes(config, engine) * shape.params
    if ranks == 1 or engine.sharding == "zero1":
        return whole
    return whole / (engine.fsdp_size if engine.fsdp_size > 0 else ranks)


def rollout_bytes(config: Any, shape: ModelShape) -> dict[str, float]:
    """The engine's own weights, if it has any, and a KV cache for all sequences it runs at once."""
    rollout = config.actor_rollout_ref.rollout
    size = 4 if config.trainer.device == "cpu" else (1 if rollout.quantization == "fp8" else 2)
    tensor = rollout.tensor_model_parallel_size
    parts: dict[str, float] = {}
    is_built_in = rollout.name in ("native", "hf")
    is_apart = not config.actor_rollout_ref.hybrid_engine
    if is_apart or not (is_built_in and has_whole_weights(config)):
        parts["engine weights"] = size * shape.params / tensor
    sequences = math.ceil(config.data.train_batch_size * rollout.n / replicas(config))
    running = min(sequences, rollout.max_num_seqs)
    tokens = running * (rollout.prompt_length + rollout.response_length)
    per_token = 2 * max(size, 2) * shape.layers * shape.kv_heads * shape.head_dim / tensor
    parts["KV cache"] = tokens * per_token
    return parts


def activation_bytes(config: Any, shape: ModelShape) -> tuple[float, float]:
    """Activations and head of the largest micro-batch: to score it, and to train on it."""
    engine = engine_of(config, "actor_rollout_ref")
    compute = compute_bytes(config, engine)
    trained = tokens_per_micro_batch(config, config.actor_rollout_ref.actor, "ppo_")
    scored = tokens_per_micro_batch(config, config.actor_rollout_ref.rollout, "log_prob_")
    width = 5 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = compute * (width + 3 * active_inner(shape))
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        kept = shape.layers * compute * shape.hidden + layer
    else:
        kept = shape.layers * layer
    scoring = scored * layer + 4 * shape.vocab * min(scored, HEAD_CHUNK)
    training = trained * kept + 8 * shape.vocab * min(trained, HEAD_CHUNK)
    return scoring, training


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


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read `config.json` in a model's folder; FileNotFoundError when there is none."""
    text = (Path(folder).expanduser() / "config.json").read_text()
    return model_shape(json.loads(text))


def model_shape(described: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes; of a multimodal model, its language part."""
    if "text_config" in described:
        described = {
            "tie_word_embeddings": described.get("tie_word_embeddings"),
            **described["text_config"],
        }
    model_type = str(described["model_type"])
    traits = dict(FAMILIES.get(model_type, {}))
    tied = described.get("tie_word_embeddings")
    is_tied_by_default = traits.pop("is_tied_by_default", False)
    heads, layers = described["num_attention_heads"], described["num_hidden_layers"]
    has_bias = bool(described.get("attention_bias"))
    traits.setdefault("has_qkv_bias", has_bias)
    return ModelShape(
        model_type=model_type,
        hidden=described["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or described["hidden_size"] // heads,
        inner=described["intermediate_size"],
        vocab=described["vocab_size"],
        is_tied=is_tied_by_default if tied is None else bool(tied),
        is_family_known=model_type in FAMILIES,
        has_output_bias=has_bias,
        has_mlp_bias=bool(described.get("mlp_bias")),
        **traits,
        **expert_sizes(described, layers),
    )


def expert_sizes(described: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Sizes of a mixture of experts, under the names that the families use."""
    experts = described.get("num_experts") or described.get("num_local_experts") or 0
    if not experts:
        return {}
    step = described.get("decoder_sparse_step") or 1
    dense_only = set(described.get("mlp_only_layers") or [])
    sparse = [n for n in range(layers) if n not in dense_only and (n + 1) % step == 0]
    return {
        "experts": experts,
        "experts_per_token": described.get("num_experts_per_tok") or 2,
        "expert_inner": described.get("moe_intermediate_size") or described["intermediate_size"],
        "shared_inner": described.get("shared_expert_intermediate_size") or 0,
        "dense_layers": layers - len(sparse),
    }
