"""A reward model is loaded with the head it was trained with, or not at all."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_model
from tests.workers.reward_model.models import reward_model, save
from verl.models.loading import load_reward_model, load_value_model, score_head


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_classifier_keeps_its_head(tmp_path, model_type, kind):
    model = reward_model(model_type, kind=kind)
    head = score_head(load_reward_model(save(model, tmp_path)))
    assert torch.equal(head.weight, model.score.weight)
    assert (head.bias is None) == (kind == "sequence")
    if kind == "token":
        assert torch.equal(head.bias, model.score.bias)


def test_a_token_classifier_without_a_bias_has_a_bias_of_zero(tmp_path):
    folder = save(reward_model("llama", kind="token"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = score_head(load_reward_model(folder))
    assert head.bias.tolist() == [0.0]
    assert torch.equal(head.weight, weights["score.weight"])


def test_a_language_model_with_a_value_head_is_a_reward_model(tmp_path):
    folder = save(tiny_model("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = score_head(load_reward_model(folder))
    assert torch.equal(head.weight, weights["v_head.summary.weight"])
    assert head.bias.tolist() == [1.0]


def test_a_model_without_a_head_is_refused_instead_of_rewarding_noise(tmp_path):
    folder = save(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"has no score\.weight; a reward model is"):
        load_reward_model(folder)


def test_a_classifier_with_several_labels_is_refused(tmp_path):
    folder = save(reward_model("llama", num_labels=3), tmp_path)
    with pytest.raises(ValueError, match="a classifier with 3 labels; a reward model has one"):
        load_reward_model(folder)


def test_a_critic_that_starts_from_a_reward_model_keeps_its_head(tmp_path):
    """A sequence classifier has no bias; that it is missing says nothing about the weight."""
    model = reward_model("llama", kind="sequence")
    head = score_head(load_value_model(save(model, tmp_path)))
    assert torch.equal(head.weight, model.score.weight)
    assert head.bias.tolist() == [0.0]


def test_a_critic_that_starts_from_a_language_model_predicts_zero(tmp_path):
    head = score_head(load_value_model(save(tiny_model("llama"), tmp_path)))
    assert not head.weight.any()
    assert head.bias.tolist() == [0.0]
