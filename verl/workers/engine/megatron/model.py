"""megatron-core's `GPTModel` for a Hugging Face configuration: one chunk per virtual stage.

A family states what differs from the common shape (RMS norms, gated SiLU, rotary positions, no
biases): its query biases, its query and key norms, its experts, its latent attention. What a
configuration asks for that the model cannot do (sliding windows, other activations, scaled rotary
embeddings that also scale attention) is refused by name. Layers are megatron-core's local ones with
packed attention (`attention.PackedAttention`), so the same model runs on a CPU and on a GPU.

A value model has, in place of the output layer, `ValueHead`: the layer `score` of our value models.
Weights are not initialized here: `weights.load_weights` fills every one.
"""

# megatron-core's own annotations leave out or mix up types of groups and modules.
# pyright: reportArgumentType=false, reportOptionalIterable=false
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError, Fault
from verl.workers.engine.megatron.attention import LatentRotary, Norm, PackedAttention
from verl.workers.engine.megatron.balance import BalancedRouter, tell_router
from verl.workers.engine.megatron.cpu import has_gpu
from verl.workers.engine.megatron.layout import (
    Layout,
    expert_width,
    is_latent,
    num_experts,
    padded_vocabulary,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
"""Values of `model_type` that are built and converted."""

if not transformer_engine.HAVE_TE:
    # Without TransformerEngine megatron-core 0.16 takes it for present here, and misses a name.
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None

LATENT_NORM_EPSILON = 1e-6
"""Of the norms inside latent attention, which a configuration does not state."""


def transformer_config(
    hf_config: Any, engine: McoreEngineConfig, layout: Layout, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's configuration of the model, with the user's overrides."""
    text = hf_config.get_text_config()
    faults = list(model_faults(text))
    if faults:
        raise ConfigError([Fault(fault) for fault in faults])
    kind = MLATransformerConfig if is_latent(text) else TransformerConfig
    values = {
        **shape_values(text),
        **(latent_values(text) if is_latent(text) else {}),
        **(expert_values(text) if num_experts(text) else {}),
        **parallel_values(engine, layout, dtype),
    }
    return kind(**{**values, **checked_overrides(kind, engine.override_transformer_config)})


def model_faults(text: Any) -> Iterator[str]:
    """What the configuration asks for that the model here cannot do."""
    values, name = text.to_dict(), text.model_type
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        yield f"megatron: no table for model_type {name!r}; there are {known}. Set strategy=fsdp"
        return
    kinds = set(values.get("layer_types") or ["full_attention"])
    window = values.get("sliding_window") if name in ("mistral", "mixtral") else None
    if kinds != {"full_attention"} or window:
        yield f"megatron: {name} attends in a sliding window here, which packed attention has not"
    if text.hidden_act != "silu":
        yield f"megatron: hidden_act is {text.hidden_act!r}; the model has silu"
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            yield f"megatron: {key} is set, but only query, key and value of qwen2 have a bias"
    rope = values["rope_parameters"]["rope_type"]
    if rope not in ("default", "linear", "llama3", "yarn"):
        yield f"megatron: rope_type {rope!r} is not known for {name}; set strategy=fsdp"
    if name == "deepseek_v3":
        yield from latent_faults(text)


def latent_faults(text: Any) -> Iterator[str]:
    if not text.rope_interleave:
        yield "megatron: rope_interleave is False, but latent attention rotates neighbours"
    if text.rms_norm_eps != LATENT_NORM_EPSILON:
        yield f"megatron: rms_norm_eps is {text.rms_norm_eps}; latent attention has 1e-06"
    if not text.norm_topk_prob:
        yield "megatron: norm_topk_prob is off, but sigmoid scores are always normalized"
    if text.num_experts_per_tok // text.topk_group != 2:
        yield (
            f"megatron: num_experts_per_tok ({text.num_experts_per_tok}) must be twice topk_group "
            f"({text.topk_group}): a group's score is the sum of its best two experts"
        )


def shape_values(text: Any) -> dict[str, Any]:
    heads = text.num_attention_heads
    head_size = text.to_dict().get("head_dim") or text.hidden_size // heads
    _, factor = rotary_frequencies(text)
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": head_size,
        # Queries and keys that are both scaled (YaRN) are scores scaled twice.
        "softmax_scale": factor**2 * head_size**-0.5,
        "ffn_hidden_size": text.intermediate_size,
        "layernorm_epsilon": text.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": text.model_type == "qwen2",
        "qk_layernorm": text.model_type in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def latent_values(text: Any) -> dict[str, Any]:
    rope = text.rope_parameters
    return {
        "multi_latent_attention": True,
        "q_lora_rank": text.q_lora_rank,
        "kv_lora_rank": text.kv_lora_rank,
        "qk_head_dim": text.qk_nope_head_dim,
        "qk_pos_emb_head_dim": text.qk_rope_head_dim,
        "v_head_dim": text.v_head_dim,
        "rotary_base": rope["rope_theta"],
        "rope_type": "rope",  # until the layers are built: `LatentRotary` takes its place
        "rotary_scaling_factor": rope.get("factor") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        "num_query_groups": text.num_attention_heads,
    }


def expert_values(text: Any) -> dict[str, Any]:
    """Routing as the Hugging Face model does it, without an auxiliary loss or dropped tokens.

    Weights that are normalized over the chosen experts are a softmax over their logits alone.
    """
    values: dict[str, Any] = {
        "num_moe_experts": num_experts(text),
        "moe_ffn_hidden_size": expert_width(text),
        "moe_layer_freq": [int(is_sparse) for is_sparse in sparse_layers(text)],
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": text.model_type == "qwen3_moe" and not text.norm_topk_prob,
    }
    if text.model_type == "deepseek_v3":
        values |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
            "moe_router_num_groups": text.n_group,
            "moe_router_group_topk": text.topk_group,
            "moe_router_topk_scaling_factor": text.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": text.moe_intermediate_size
            * text.n_shared_experts,
        }
    return values


def sparse_layers(text: Any) -> list[bool]:
    """Which layers have experts."""
    values = text.to_dict()
    if num_experts(text) is None:
        return [False] * text.num_hidden_layers
    if text.model_type == "deepseek_v3":
        return [layer >= text.first_k_dense_replace for layer in range(text.num_hidden_layers)]
    every, dense = values.get("decoder_sparse_step") or 1, values.get("mlp_only_layers") or []
    return [
        layer not in dense and (layer + 1) % every == 0 for layer in range(text.num_hidden_layers)
    ]


def parallel_values(
    engine: McoreEngineConfig, layout: Layout, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": engine.sequence_parallel and layout.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "variable_seq_lengths": True,  # packed micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",  # the one that allows that
        "perform_initialization": False,
        "use_cpu_initialization": not has_gpu(),
        "gradient_accumulation_fusion": False,  # an extension of apex
        "bias_dropout_fusion": False,
        "cuda_graph_scope": [],
    }


def checked_overrides(kind: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields; one that megatron-core does not have is refused."""
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    faults, values = [], {key: value for key, value in overrides.items() if value is not None}
    for key in values.keys() - names:
        close = get_close_matches(key, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        text = f"override_transformer_config.{key}: megatron-core has no such field{hint}"
        faults.append(Fault(text, (f"override_transformer_config.{key}",)))
    if faults:
        raise ConfigError(faults)
    if isinstance(values.get("attention_backend"), str):
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    return values


def build_chunks(
    hf_config: Any,
    engine: McoreEngineConfig,
    layout: Layout,
    dtype: torch.dtype,
    *,
    is_value_model: bool = False,
) -> "list[ModelChunk]":
    """This rank's part of the model, one chunk per virtual stage, its weights not yet loaded.

    `parallel_state` must be initialized with `layout`. Logits are split over the tensor group and
    may have columns past `vocab_size` (`layout.padded_vocabulary`).
    """
    text = hf_config.get_text_config()
    config = transformer_config(hf_config, engine, layout, dtype)
    chunks, shapes = [], whole_shapes(hf_config, is_value_model=is_value_model)
    for stage in range(layout.virtual_pipeline or 1):
        vp_stage = stage if layout.virtual_pipeline else None
        spec: Any = get_gpt_decoder_block_spec(
            config, False, config.normalization, vp_stage=vp_stage
        )
        spec.layer_norm = Norm
        for layer in spec.layer_specs:
            use_our_modules(layer)
        is_last = is_last_stage(layout, stage)
        chunk = ModelChunk(
            config,
            spec,
            vocab_size=padded_vocabulary(text, layout.tensor),
            max_sequence_length=text.max_position_embeddings,
            pre_process=parallel_state.get_pipeline_model_parallel_rank() == 0 and stage == 0,
            post_process=is_last,
            share_embeddings_and_output_weights=is_tied(hf_config) and not is_value_model,
            position_embedding_type="none" if is_latent(text) else "rope",
            rotary_base=text.rope_parameters["rope_theta"],
            vp_stage=vp_stage,
        )
        chunk.whole_shapes = shapes
        if is_last and is_value_model:
            chunk.output_layer = ValueHead(config)  # pyright: ignore[reportAttributeAccessIssue]
        set_frequencies(chunk, text)
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                layer.register_forward_pre_hook(tell_router, with_kwargs=True)
        chunks.append(chunk.to(dtype) if dtype == torch.float64 else chunk)
    if is_latent(text):
        config.rope_type = "yarn"  # of the two kinds, the one whose angles come with a factor
    return chunks


class ModelChunk(GPTModel):
    """One chunk of a model, with the shapes of the whole model's tensors."""

    whole_shapes: dict[str, torch.Size]
    """By Hugging Face name, in the order of the Hugging Face model; tied weights once."""

    def _is_in_embd_group(self) -> bool:
        """Whether to send the embedding to its copy on the last stage when the model is built:
        never, as both are loaded."""
        return False

    def _set_attention_backend(self) -> None:
        """Sets no environment variables for kernels that are not used: roles of one process may
        state different ones."""


def whole_shapes(hf_config: Any, *, is_value_model: bool) -> dict[str, torch.Size]:
    config = deepcopy(hf_config)
    if is_value_model:
        config.num_labels = 1
    kind = AutoModelForTokenClassification if is_value_model else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    tied = {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    return {name: value.shape for name, value in model.state_dict().items() if name in tied}


def use_our_modules(layer: ModuleSpec) -> None:
    """Packed attention, and a norm that allows sequence parallelism, in place of the library's."""
    parts: Any = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if isinstance(parts.mlp.submodules, MoESubmodules):
        parts.mlp.submodules.router = BalancedRouter
    if isinstance(attention, multi_latent_attention.MLASelfAttentionSubmodules):
        # Whole on every rank: megatron-core's divided ones leave out a part of the gradient of the
        # keys' rotary numbers, which all heads share.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    for submodules in (parts, attention):
        for name, kind in vars(submodules).items():
            if kind is WrappedTorchNorm:
                setattr(submodules, name, Norm)


def is_last_stage(layout: Layout, stage: int) -> bool:
    is_last = parallel_state.get_pipeline_model_parallel_rank() == layout.pipeline - 1
    return is_last and stage == (layout.virtual_pipeline or 1) - 1


def is_tied(hf_config: Any) -> bool:
    return bool(hf_config.get_text_config().to_dict().get("tie_word_embeddings"))


def set_frequencies(chunk: GPTModel, text: Any) -> None:
    """Rotate by the frequencies that the Hugging Face model has, scaled ones included."""
    frequencies, factor = rotary_frequencies(text)
    if not is_latent(text):
        chunk.rotary_pos_emb.inv_freq = frequencies
        return
    for layer in chunk.decoder.layers:
        layer.self_attention.rotary_pos_emb = LatentRotary(frequencies, factor)


def rotary_frequencies(text: Any) -> tuple[Tensor, float]:
    """(size / 2,) of each pair, and the factor of cosines and sines."""
    rope, device = text.rope_parameters, torch.device("cpu")
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](text, device)
    size = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / rope["rope_theta"] ** exponents, 1.0


class ValueHead(nn.Linear):
    """One number per token, whole on every rank of a tensor group."""

    def __init__(self, config: TransformerConfig) -> None:
        device = "cpu" if config.use_cpu_initialization else "cuda"
        super().__init__(config.hidden_size, 1, device=device, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """(tokens, 1, hidden) to (tokens, 1, 1); the other arguments are an output layer's."""
        if self.sequence_parallel:
            # Every rank computes all tokens, so gradients of this layer are whole on each.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=False)
        return super().forward(input), None
