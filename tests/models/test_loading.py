"""What loading a model promises about its weights."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.models.test_packed import packed_logits, random_ids
from tests.tiny_models import plain_twin, tiny_model
from tests.tiny_tokenizer import save_tiny_model
from verl.config.faults import ConfigError
from verl.models.attention import ATTENTION
from verl.models.loading import (
    CACHE_LINE,
    BadModel,
    load_causal_lm,
    load_value_model,
    read_config,
)


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_weights_begin_at_cache_lines_wherever_they_stand_in_their_file(tmp_path, load):
    folder = save_tiny_model(tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert any(weight.data_ptr() % CACHE_LINE for weight in stored)  # or this test shows nothing
    assert all(weight.data_ptr() % CACHE_LINE == 0 for weight in load(str(folder)).parameters())


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, load):
    folder = save_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks 1 weights of .*\(model\.layers\.1\.mlp\.up_proj"):
        load(str(folder))


def test_a_tied_weight_stays_one(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_rope_scaling_is_added_to_what_the_model_has(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    plain = read_config(str(tmp_path), None, False).rope_parameters
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = read_config(str(tmp_path), {"rope_scaling": yarn}, False)
    assert config.rope_parameters["rope_theta"] == plain["rope_theta"]
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 4.0
    scaled = load_causal_lm(str(tmp_path), override_config={"rope_scaling": yarn})
    usual = load_causal_lm(str(tmp_path))
    frequencies = [model.model.rotary_emb.inv_freq for model in (scaled, usual)]
    assert not frequencies[0].equal(frequencies[1])
    theta = read_config(str(tmp_path), {"rope_theta": 5e5}, False).rope_parameters
    assert theta == {**plain, "rope_theta": 5e5}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    ],
)  # fmt: skip
def test_scaled_positions_give_the_logits_of_an_unmodified_model(tmp_path, scaling):
    tiny_model("llama").save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), override_config={"rope_scaling": scaling})
    ids = random_ids([20])
    expected = plain_twin(model)(ids[None]).logits[0]
    torch.testing.assert_close(packed_logits(model, ids, [20]), expected, rtol=1e-4, atol=2e-5)
    usual = packed_logits(load_causal_lm(str(tmp_path)), ids, [20])
    assert not torch.allclose(expected, usual, atol=1e-3)


def test_attention_is_ours_whatever_the_override_says(tmp_path):
    """Packed rows need it; the command says that the key has no effect."""
    tiny_model("llama").save_pretrained(tmp_path)
    for name in ("eager", "sdpa", "flash_attention_2"):
        model = load_causal_lm(str(tmp_path), override_config={"attn_implementation": name})
        assert model.config._attn_implementation == ATTENTION


def test_a_value_that_the_model_does_not_have_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'max_position_embeddings'"):
        read_config(str(tmp_path), {"max_position_embedings": 64}, False)
    assert read_config(str(tmp_path), {"attn_implementation": "eager"}, False)
