"""Models of known shapes with random weights. `tiny` is for trying a benchmark on a CPU."""

import torch
from transformers import PreTrainedModel, Qwen2Config

from verl.models.fuse import fuse_model
from verl.models.loading import random_causal_lm

VOCABULARY = 151936

SHAPES = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "3B": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}  # fmt: skip


def model_config(shape: str) -> Qwen2Config:
    """Qwen2.5 of that size. No token ends a response, so every engine gives the same number."""
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, **SHAPES[shape]}
    return Qwen2Config(
        max_position_embeddings=32768, rope_theta=1e6, bos_token_id=None, eos_token_id=None, **sizes
    )


def number_format(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def random_model(shape: str, device: str = "cuda", seed: int = 0) -> PreTrainedModel:
    """A model as training and rollout share it, with fused layers where kernels can run."""
    with torch.device(device):
        model = random_causal_lm(model_config(shape), dtype=number_format(device), seed=seed)
    fuse_model(model)
    return model
