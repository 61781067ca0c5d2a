"""Models of known shapes with random weights, and what the machine can do."""

import argparse

import torch
from transformers import PreTrainedModel, Qwen2Config

from verl.models.loading import random_causal_lm

SHAPES = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "3B": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_model(shape: str, device: str = "cuda") -> PreTrainedModel:
    """A Qwen2 of that shape in bf16."""
    config = Qwen2Config(
        vocab_size=151936, max_position_embeddings=32768, rope_theta=1e6, **SHAPES[shape]
    )
    with torch.device(device):
        return random_causal_lm(config, dtype=torch.bfloat16)


def workload_parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark that generates; the defaults are the workload 128x8x512."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    return parser


def ceilings() -> dict[str, float]:
    """What this machine reaches now: bf16 matrix products and copies, on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    matmul = milliseconds(lambda: a @ b)
    copy = milliseconds(lambda: target.copy_(source))
    return {
        "matmul_tflops": 2 * 8192**3 / matmul / 1e9,
        "copy_tb_per_s": 2 * source.nbytes / copy / 1e9,
    }


def milliseconds(run, repeats: int = 10) -> float:
    """The median of several runs, by the device's own clock."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]
