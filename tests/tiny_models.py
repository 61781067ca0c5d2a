"""Tiny random models of every architecture the tests cover: two layers, a few thousand weights."""

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.models.loading import random_causal_lm

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt2": {"num_key_value_heads": 4},
    "phi": {},
    "phi3": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 8, **MOE},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SHAPE, **ARCHITECTURES[model_type], **changes})


def tiny_model(model_type: str, scale: float = 0.2, **changes: Any) -> PreTrainedModel:
    """Our version of the model: packed attention, no dropout. Weights are larger than the usual
    0.02, so that attention and experts make a visible difference."""
    model = random_causal_lm(tiny_config(model_type, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
    return model


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in an unmodified transformers model with its eager attention and experts."""
    config = deepcopy(model.config)  # from_config writes the attention into the config it is given
    config._experts_implementation = "eager"
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()
