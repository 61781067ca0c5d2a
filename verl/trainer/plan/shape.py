"""The sizes of a model, read from its `config.json`.

The number of parameters follows from a model's `config.json`. A decoder is an embedding, L layers
of attention and MLP, a last norm and a head; families differ in a few terms, which are named below.
With h hidden units, n query heads and k key/value heads of size d, i inner units and V words,

    attention = h*n*d + 2*h*k*d + n*d*h    (+ biases, + norms of queries and keys)
    mlp       = 3*h*i                      (per expert, + h*E for the router of E experts)
    total     = V*h + L*(attention + mlp + norms) + h    (+ V*h unless the head is tied)

The parameters of a vision tower and of what joins it to the language model, from `config.json`.

A tower embeds patches and has D layers of width v with m inner units, all with biases:

    layer = 4*v*v + 4*v + mlp + norms        mlp = 2*v*m + m + v, gated 3*v*m + 2*m + v

A merger makes one token of w = v * merge^2 numbers (Qwen): w*w + w + w*h + h, and a norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.user_files import BrokenFile, read_json_object

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
    "deepseek_v3": {},
    "gpt_oss": {"has_sinks": True, "has_expert_bias": True},
}


LANGUAGE_PARTS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Families whose layers are those of the language part of a model that sees; older files describe
it beside the tower."""


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (arXiv:2405.04434): queries, keys and values come from
    narrow latents. Keys and values are cached as heads, not as latents."""

    query_rank: int
    key_value_rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        return self.rope_dim + self.plain_dim

    def ends(self, hidden: int, heads: int) -> int:
        """Inputs and outputs of all its linear layers."""
        queries, rank = heads * self.key_dim, self.query_rank
        query = hidden + 2 * rank + queries if rank else hidden + queries
        latent = hidden + self.key_value_rank + self.rope_dim
        expanded = self.key_value_rank + heads * (self.plain_dim + self.value_dim)
        return query + latent + expanded + heads * self.value_dim + hidden

    def params(self, hidden: int, heads: int) -> int:
        queries = heads * self.key_dim
        rank = self.query_rank
        query = rank * (hidden + 1 + queries) if rank else hidden * queries
        latent = hidden * (self.key_value_rank + self.rope_dim) + self.key_value_rank
        expanded = self.key_value_rank * heads * (self.plain_dim + self.value_dim)
        return query + latent + expanded + heads * self.value_dim * hidden


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
    has_sinks: bool = False
    has_expert_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    shared_has_gate: bool = True
    dense_layers: int = 0
    latent: "LatentAttention | None" = None
    tower_params: int = 0
    """The part that sees, where images can be given to the model."""

    @property
    def attention_params(self) -> int:
        if self.latent is not None:
            return self.latent.params(self.hidden, self.heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.hidden * (2 * queries + 2 * keys)
        count += (queries + 2 * keys) if self.has_qkv_bias else 0
        count += self.hidden if self.has_output_bias else 0
        count += 2 * self.head_dim if self.has_qk_norm else 0
        count += queries + keys if self.has_wide_qk_norm else 0
        count += self.heads if self.has_sinks else 0
        return count

    @property
    def dense_mlp_params(self) -> int:
        bias = 2 * self.inner + self.hidden if self.has_mlp_bias else 0
        return 3 * self.hidden * self.inner + bias

    @property
    def sparse_mlp_params(self) -> int:
        """All experts, the router, and the shared expert with its gate."""
        count = self.experts * (3 * self.hidden * self.expert_inner + self.hidden)
        if self.has_expert_bias:  # the router's too
            count += self.experts * (2 * self.expert_inner + self.hidden + 1)
        if self.shared_inner:
            count += 3 * self.hidden * self.shared_inner
            count += self.hidden if self.shared_has_gate else 0
        return count

    @property
    def kv_width(self) -> int:
        """Numbers that a layer keeps of a token."""
        if self.latent is not None:
            return self.heads * (self.latent.key_dim + self.latent.value_dim)
        return 2 * self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> int:
        """Numbers that attention keeps of a token for the backward pass: its inputs and output."""
        if self.latent is not None:
            return self.heads * 2 * (self.latent.key_dim + self.latent.value_dim)
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def expert_params(self) -> int:
        """Routed experts of one layer."""
        return 3 * self.experts * self.hidden * self.expert_inner

    @property
    def linear_params(self) -> int:
        """Linear layers of the body: attention, dense MLPs, shared experts."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        shared = 3 * self.hidden * self.shared_inner
        dense = (self.layers - sparse) * self.dense_mlp_params
        return self.layers * self.attention_params + dense + sparse * shared

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
        head = 0 if self.is_tied else self.embedding_params
        return self.body_params + head + self.tower_params

    @property
    def value_model_params(self) -> int:
        """The body with one output per token instead of a head."""
        return self.body_params + self.hidden

    def lora_params(self, rank: int, *, on_experts: bool = False) -> int:
        """Adapters of this rank on every linear layer of the body, the head excluded; where there
        are experts, on attention and, if so asked, on both tensors of each."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        if self.latent is not None:
            attention = self.latent.ends(self.hidden, self.heads)
        mlp = 0 if self.experts else 3 * (self.hidden + self.inner)
        sparse = self.experts * (self.layers - self.dense_layers) if on_experts else 0
        per_expert = (self.hidden + 2 * self.expert_inner) + (self.expert_inner + self.hidden)
        return rank * (self.layers * (attention + mlp) + sparse * per_expert)


def shape_at(path: str) -> tuple[ModelShape | None, str]:
    """The shape of the model in a folder, or None and the reason why it is not known."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return None, f"config.json not found at {folder}"
    try:
        return read_model_shape(folder), ""
    except (KeyError, BrokenFile) as error:
        return None, f"config.json at {folder} does not describe a model we can count ({error!r})"


def length_notices(config: Any) -> list[str]:
    """A warning where sequences may have more tokens than the model has positions for."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    try:
        described = read_json_object(Path(model.path).expanduser() / "config.json")
        stated = {**described, **(described.get("text_config") or {}), **model.override_config}
    except (OSError, BrokenFile, TypeError):  # named where the model is read
        return []
    positions = stated.get("max_position_embeddings", stated.get("n_positions"))
    scaling = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    longest = rollout.prompt_length + rollout.response_length
    if not isinstance(positions, int) or "factor" in scaling or longest <= positions:
        return []
    return [
        f"a prompt and its response may have {longest:,} tokens, and the model has "
        f"max_position_embeddings {positions:,}: lower data.max_prompt_length or "
        "data.max_response_length, or extend the model with "
        "actor_rollout_ref.model.override_config.rope_scaling (docs/models.md)"
    ]


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read `config.json` in a model's folder."""
    return model_shape(read_json_object(Path(folder).expanduser() / "config.json"))


def model_shape(described: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes; of a multimodal model, its language part and how
    many parameters see."""
    tower = tower_params(described) if described.get("vision_config") else 0
    if "text_config" in described:
        described = {
            "tie_word_embeddings": described.get("tie_word_embeddings"),
            **described["text_config"],
        }
    model_type = str(described["model_type"])
    model_type = LANGUAGE_PARTS.get(model_type, model_type)
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
        latent=latent_attention(described),
        tower_params=tower,
        **traits,
        **expert_sizes(described, layers),
    )


def latent_attention(described: Mapping[str, Any]) -> LatentAttention | None:
    if not described.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=described.get("q_lora_rank") or 0,
        key_value_rank=described["kv_lora_rank"],
        rope_dim=described["qk_rope_head_dim"],
        plain_dim=described["qk_nope_head_dim"],
        value_dim=described["v_head_dim"],
    )


def expert_sizes(described: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Sizes of a mixture of experts, under the names that the families use."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, map(described.get, names)), 0)
    if not experts:
        return {}
    inner = described.get("moe_intermediate_size") or described["intermediate_size"]
    shared, first_dense = described.get("n_shared_experts"), described.get("first_k_dense_replace")
    step = described.get("decoder_sparse_step") or 1
    dense_only = set(described.get("mlp_only_layers") or [])
    dense_only |= set(range(first_dense or 0))
    sparse = [n for n in range(layers) if n not in dense_only and (n + 1) % step == 0]
    return {
        "experts": experts,
        "experts_per_token": described.get("num_experts_per_tok") or 2,
        "expert_inner": inner,
        "shared_inner": described.get("shared_expert_intermediate_size") or inner * (shared or 0),
        "shared_has_gate": not shared,
        "dense_layers": layers - len(sparse),
    }


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
