import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verl.utils.model import (
    compute_position_id_with_mask,
    convert_weight_keys,
    create_random_mask,
    extract_multi_modal_inputs,
    get_generation_config,
    get_model_size,
    print_model_size,
    update_model_config,
)

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 3, 3]]
    assert compute_position_id_with_mask(mask.bool()).dtype == torch.int64


@given(st.integers(1, 40), st.floats(0, 0.5), st.floats(0.1, 0.5))
def test_a_random_mask_is_padding_tokens_padding(length, left, valid):
    ids = torch.zeros(16, length, dtype=torch.long)
    if int(length * valid) < 1:
        with pytest.raises(ValueError, match="with at least one token"):
            create_random_mask(ids, valid, left)
        return
    mask = create_random_mask(ids, valid, left)
    assert mask.sum(-1).min() >= 1
    assert mask.sum(-1).max() <= length * valid
    assert mask.argmax(-1).max() <= length * left
    assert (mask.diff(prepend=torch.zeros(16, 1)).clamp(min=0).sum(-1) == 1).all()  # one run of 1


def test_a_random_mask_must_fit():
    with pytest.raises(ValueError, match="that must fit"):
        create_random_mask(torch.zeros(2, 10), 0.8, 0.3)


def test_overrides_reach_nested_parts():
    config = AutoConfig.for_model("llama", **SHAPE)
    config.vision = AutoConfig.for_model("llama", **SHAPE)
    update_model_config(
        config,
        {"attention_dropout": 0.5, "vision": {"hidden_size": 4}, "rope_parameters": {"x": 1}},
    )
    assert config.attention_dropout == 0.5
    assert config.vision.hidden_size == 4
    assert config.vision.vocab_size == 16
    assert config.rope_parameters == {"x": 1}  # a plain dictionary is replaced


def test_an_override_nobody_declares_is_set_and_reported(caplog):
    config = AutoConfig.for_model("llama", **SHAPE)
    with caplog.at_level(logging.WARNING):
        update_model_config(config, {"attention_dropoot": 0.5})
    assert config.attention_dropoot == 0.5
    assert (
        "'attention_dropoot' is new to LlamaConfig; did you mean 'attention_dropout'?"
        in caplog.text
    )


def test_generation_settings_come_from_their_file_else_from_the_model(tmp_path):
    assert get_generation_config(str(tmp_path)) is None
    AutoConfig.for_model("llama", **SHAPE, eos_token_id=7).save_pretrained(tmp_path)
    implied = get_generation_config(str(tmp_path))
    assert implied is not None
    assert implied.eos_token_id == 7
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)
    written = get_generation_config(str(tmp_path))
    assert written is not None
    assert written.eos_token_id == [7, 8]


def test_sizes_are_readable(caplog):
    linear = torch.nn.Linear(1000, 2, bias=False)
    assert get_model_size(linear) == (2.0, "K")
    assert get_model_size(linear, "M") == (0.002, "M")
    assert get_model_size(torch.nn.Linear(2, 2, bias=False)) == (4, "")
    with pytest.raises(ValueError, match="scale is 'T'"):
        get_model_size(linear, "T")
    with caplog.at_level(logging.INFO, logger="verl"):
        print_model_size(linear, "actor")
    assert "actor contains 2.00K parameters" in caplog.text


def test_weights_get_the_names_of_their_checkpoint(tmp_path):
    from safetensors.torch import load_file

    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    config = AutoConfig.for_model("qwen3_moe", **SHAPE, **experts, head_dim=4)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    converted = convert_weight_keys(model.state_dict(), model)
    assert converted.keys() == saved.keys()
    assert any("experts.1.down_proj" in key for key in saved)  # one matrix per expert on disk
    assert all(torch.equal(converted[key], saved[key]) for key in saved)


def test_images_of_the_chosen_rows_are_joined():
    rows = [
        {"pixel_values": torch.ones(2, 3), "image_grid_thw": torch.ones(1, 3)},
        None,
        NonTensorData({"pixel_values": torch.zeros(1, 3), "video": None}),
    ]
    joined = extract_multi_modal_inputs(rows)
    assert {key: tuple(value.shape) for key, value in joined.items()} == {
        "pixel_values": (3, 3),
        "image_grid_thw": (1, 3),
    }
    assert extract_multi_modal_inputs(rows, indices=[2, 0])["pixel_values"][0].tolist() == [0, 0, 0]
    assert extract_multi_modal_inputs(rows, indices=[1]) == {}


def test_models_that_mark_image_positions_get_lists():
    rows = [{"image_bound": torch.zeros(1, 2), "pixel_values": torch.ones(2, 3)}] * 2
    assert [len(values) for values in extract_multi_modal_inputs(rows).values()] == [2, 2]
