"""How fast experts are computed on one GPU: grouped products against the module's own loop.

    python -m benchmarks.gpu.experts --out experts.json [--shape 64x8] [--time-limit 150]

Qwen3-MoE-like models with random weights that fit one GPU. Three implementations take turns on the
same module: ours (`verl`), transformers' loop over experts (`eager`) and its `grouped_mm`.
`train` is forward and backward over packed sequences, `scoring` the forward pass, `decode_pass` one
token for each of many rows without attention over a past. `generate` is the built-in engine, whole
workload, with graphs; only implementations that never wait for the device can be captured, so it
runs ours, beside the least time that reading all weights once per step takes. Numbers first agree:
`difference` is the largest difference of hidden states and of gradients from `eager`.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig

from benchmarks.gpu.measuring import back_and_forth, ceilings, environment, peak_gib, timed, write
from benchmarks.gpu.workload import Workload, requests
from verl.models.experts import EXPERTS
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.fuse import fuse_model
from verl.models.loading import random_causal_lm
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 512,
    },
    "8x2": {
        "hidden_size": 2048, "moe_intermediate_size": 4096, "num_hidden_layers": 12,
        "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 151936,
    },
    "64x8": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 12,
        "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 64,
        "num_experts_per_tok": 8, "vocab_size": 151936,
    },
}  # fmt: skip
IMPLEMENTATIONS = (EXPERTS, "eager", "grouped_mm")


def build(shape: str, device: str) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        intermediate_size=SHAPES[shape]["moe_intermediate_size"],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=None,
        **SHAPES[shape],
    )
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = random_causal_lm(config, dtype=dtype)
    fuse_model(model)
    return model


def use(model: PreTrainedModel, implementation: str) -> None:
    model.config._experts_implementation = implementation


class Passes:
    """Forward and backward passes over `num_tokens` random tokens in sequences of `length`."""

    def __init__(self, model: PreTrainedModel, num_tokens: int, length: int) -> None:
        self.model = model
        lengths = [length] * (num_tokens // length)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        ids = torch.randint(10, vocabulary, (sum(lengths),), generator=generator)
        self.ids = ids.to(model.device)
        self.positions = packed_positions(lengths).to(model.device)
        self.lengths = lengths

    def hidden(self) -> Tensor:
        layout = packed_layout(self.model, self.lengths)
        return hidden_states(self.model, self.ids, self.positions, layout)

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.hidden()

    def train(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        hidden = self.hidden()
        hidden.float().square().mean().backward()
        return hidden.detach()


def difference(model: PreTrainedModel, passes: Passes) -> dict[str, dict[str, float]]:
    """Largest difference from `eager`, relative to the largest number there."""
    found: dict[str, list[Tensor]] = {}
    for name in ("eager", EXPERTS, "grouped_mm"):
        use(model, name)
        hidden = passes.train()
        weights = [p for n, p in model.named_parameters() if "experts" in n or "gate.weight" in n]
        found[name] = [hidden.float(), *(p.grad.float() for p in weights[:4] if p.grad is not None)]
    return {
        name: {
            "hidden": _relative(found[name][0], found["eager"][0]),
            "gradient": max(map(_relative, found[name][1:], found["eager"][1:])),
        }
        for name in (EXPERTS, "grouped_mm")
    }


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def in_turns(model: PreTrainedModel, run: Any, device: str, rounds: int, deadline: float) -> dict:
    """Seconds of each implementation, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for number, name in enumerate(back_and_forth(IMPLEMENTATIONS, rounds + 1)):
        if time.monotonic() > deadline and number >= 2 * len(IMPLEMENTATIONS):
            break
        use(model, name)
        elapsed, _ = timed(run, device)
        if number >= len(IMPLEMENTATIONS):
            seconds[name].append(elapsed)
    medians = {name: statistics.median(found) for name, found in seconds.items() if found}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "times_as_fast_as_eager": medians["eager"] / medians[EXPERTS],
        "times_as_fast_as_grouped_mm": medians["grouped_mm"] / medians[EXPERTS],
    }


def generate(model: PreTrainedModel, work: Workload, device: str) -> dict[str, Any]:
    """The built-in engine on the whole workload, prefill included."""
    use(model, EXPERTS)
    engine = NativeEngine(
        model,
        EngineLimits(
            max_num_seqs=work.sequences,
            max_prompt_tokens=work.prompt_tokens,
            max_response_tokens=work.new_tokens,
            max_prefill_tokens=16384,
            max_cache_bytes=40 << 30,
            tokens_per_step=8,
        ),
        eos_token_ids=[0],
    )
    vocabulary = model.config.vocab_size
    short = dataclasses.replace(work, new_tokens=min(16, work.new_tokens))
    engine.generate_batch(requests(short, vocabulary, 1))
    seconds, _ = timed(lambda: engine.generate_batch(requests(work, vocabulary, 2)), device)
    limits = ceilings(device)
    num_bytes = sum(p.nbytes for p in model.parameters())
    reading = work.new_tokens * num_bytes / (limits["copy_tb_per_s"] * 1e12)
    return {
        "batch": type(engine.core.batch).__name__,
        "seconds": seconds,
        "tokens_per_second": work.generated_tokens / seconds,
        "ceilings": limits,
        "seconds_to_read_the_weights": reading,
        "share_of_that": reading / seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="64x8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.time_limit
    model, device = build(options.shape, options.device), options.device
    passes = Passes(model, options.tokens, options.length)
    rows = Passes(model, options.rows, 1)
    result: dict[str, Any] = {
        "shape": options.shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": options.tokens,
        "difference": difference(model, Passes(model, options.length, options.length)),
        "environment": environment(device, 0),
    }
    write(options.out, result)
    rounds = options.rounds
    result["train"] = in_turns(model, passes.train, device, rounds, deadline)
    result["peak_gib"] = peak_gib(device)
    model.zero_grad(set_to_none=True)
    result["scoring"] = in_turns(model, passes.forward, device, rounds, deadline)
    result["decode_pass"] = in_turns(model, rows.forward, device, rounds, deadline)
    write(options.out, result)
    work = Workload(options.prompts, options.samples, options.prompt_tokens, options.new_tokens)
    result["workload"] = dataclasses.asdict(work)
    result["generate"] = generate(model, work, device)
    write(options.out, result)


if __name__ == "__main__":
    main()
