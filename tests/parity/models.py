"""The tiny models of the matrix as files, and as training sees them: whole, or with adapters."""

from pathlib import Path

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from tests.tiny_models import plain_twin, tiny_config, tiny_model
from verl.models.loading import empty_causal_lm, empty_value_model, load_causal_lm, load_value_model
from verl.models.lora import LoraOptions, add_lora

LORA = LoraOptions(rank=4, alpha=12)
ARCHITECTURES = ("llama", "qwen2", "qwen3_moe")  # qwen2: tied embeddings, biases
WITH_EXPERTS = ("qwen3_moe",)


def save_models(folder: Path) -> None:
    """Of each architecture a policy and a critic; its head is not zero, so gradients pass it."""
    for name in ARCHITECTURES:
        policy = plain_twin(tiny_model(name))
        policy.save_pretrained(folder / name / "actor")
        config = tiny_config(name, num_labels=1)
        critic = AutoModelForTokenClassification.from_config(config)
        critic.base_model.load_state_dict(policy.base_model.state_dict())
        with torch.no_grad():
            critic.score.weight.copy_(torch.linspace(-0.5, 0.5, critic.config.hidden_size))
            critic.score.bias.zero_()
        critic.save_pretrained(folder / name / "critic")


def load(folder: Path, architecture: str, role: str, adapters: bool) -> PreTrainedModel:
    path = str(folder / architecture / role)
    model = load_value_model(path) if role == "critic" else load_causal_lm(path)
    return with_adapters(model) if adapters else model


def skeleton(folder: Path, architecture: str, role: str, adapters: bool) -> PreTrainedModel:
    path = str(folder / architecture / role)
    model = empty_value_model(path) if role == "critic" else empty_causal_lm(path)
    return add_lora(model, LORA) if adapters else model


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Both factors are not zero, so that both have a gradient."""
    add_lora(model, LORA)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model
