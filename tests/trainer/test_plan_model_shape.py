"""Parameters counted from config.json are the parameters that transformers creates."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from tests import tiny_vision
from verl.trainer.plan.shape import FAMILIES, model_shape, read_model_shape
from verl.utils.user_files import BrokenFile

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
TRAITS = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_local_experts": 8,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}


def real_count(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_is_exact(family, tmp_path):
    config = CONFIG_MAPPING[family](**{**SMALL, **TRAITS.get(family, {})})
    config.save_pretrained(tmp_path)
    assert read_model_shape(tmp_path).params == real_count(config)


def test_biases_are_counted(tmp_path):
    config = CONFIG_MAPPING["llama"](**SMALL, attention_bias=True, mlp_bias=True)
    config.save_pretrained(tmp_path)
    assert read_model_shape(tmp_path).params == real_count(config)


def test_a_published_model_has_its_published_size():
    """Qwen2.5-7B: 7.62 billion parameters."""
    shape = model_shape(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        }
    )
    assert shape.params == 7_615_616_512


def test_an_unknown_family_is_counted_like_llama_and_says_so():
    known = {**SMALL, "model_type": "llama"}
    unknown = {**SMALL, "model_type": "brand_new"}
    assert model_shape(unknown).params == model_shape(known).params
    assert not model_shape(unknown).is_family_known


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_of_a_model_that_sees_the_tower_is_counted_too(family):
    config = tiny_vision.tiny_config(family)
    shape = model_shape(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.is_family_known
    assert 0 < shape.tower_params < shape.params / 2


def test_of_a_model_whose_images_are_not_known_here_the_language_part_is_counted():
    text = {**SMALL, "model_type": "qwen2"}
    whole = {"model_type": "llava_onevision", "text_config": text, "vision_config": {"depth": 2}}
    assert model_shape(whole).params == model_shape(text).params


def test_adapters_are_two_thin_matrices_per_linear_layer():
    """h=64, q=64, k=32, i=96: (64+64)*2 + (64+32)*2 + 3*(64+96) = 928 per rank and layer."""
    shape = model_shape({**SMALL, "model_type": "llama"})
    assert shape.lora_params(rank=4) == 4 * 3 * 928


def test_a_value_model_has_one_output_instead_of_a_head():
    shape = model_shape({**SMALL, "model_type": "llama"})
    assert shape.params - shape.value_model_params == 1000 * 64 - 64


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(BrokenFile, match=r"config\.json cannot be read: No such file"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert read_model_shape(tmp_path).layers == 3
