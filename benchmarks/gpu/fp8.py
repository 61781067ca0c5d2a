"""How much faster the built-in engine generates with fp8 linear layers, and how far off it is.

    python -m benchmarks.gpu.fp8 --out fp8.json [--shapes 0.5B 1.5B 7B] [--time-limit 170]

Two engines on one module with random weights take turns on the same workload: bf16, and fp8 weights
and activations (`verl/models/fp8.py`). `difference_from_training` compares the sampled log-probs of
each with a bf16 training pass over the same tokens; `quantize_seconds` is what an update costs.
`products` times the matrix products of one layer alone, quantizing the input included.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.gpu.decode import shortened, training_difference
from benchmarks.gpu.measuring import (
    GIB,
    back_and_forth,
    environment,
    median_seconds,
    timed,
    write,
)
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.gpu.workload import Workload, requests
from verl.models.fp8 import Fp8Linears, fp8_product, quantize_rows
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

WARM_UP_TOKENS = 24


def engine(model: PreTrainedModel, work: Workload, quantization: str | None) -> NativeEngine:
    return NativeEngine(
        model,
        EngineLimits(
            max_num_seqs=work.sequences,
            max_prompt_tokens=work.prompt_tokens,
            max_response_tokens=work.new_tokens,
            max_prefill_tokens=16384,
            max_cache_bytes=64 << 30,
            tokens_per_step=8,
        ),
        eos_token_ids=[0],
        quantization=quantization,
    )


class Contestants:
    """Both engines; only one at a time is awake, and only its layers are on."""

    def __init__(self, model: PreTrainedModel, work: Workload, device: str) -> None:
        self.device, self.vocabulary = device, model.config.vocab_size
        self.engines = {"bf16": engine(model, work, None)}
        self.run("bf16", shortened(work, WARM_UP_TOKENS), 0)  # captured before layers are replaced
        self.engines["fp8"] = engine(model, work, "fp8")
        self.run("fp8", shortened(work, WARM_UP_TOKENS), 0)
        self.formats = [matrix.is_on for matrix in self.quantized.matrices]

    @property
    def quantized(self) -> Fp8Linears:
        quantized = self.engines["fp8"].core.quantized
        assert quantized is not None
        return quantized

    def run(self, name: str, work: Workload, seed: int) -> tuple[float, Any]:
        if "fp8" in self.engines and self.quantized._is_probed:
            formats = vars(self).setdefault("formats", [m.is_on for m in self.quantized.matrices])
            for matrix, is_on in zip(self.quantized.matrices, formats, strict=True):
                matrix.is_on = is_on and name == "fp8"
        rollout = self.engines[name]
        batch = requests(work, self.vocabulary, seed)
        seconds, outputs = timed(lambda: rollout.generate_batch(batch), self.device)
        rollout.sleep()
        return seconds, (batch, outputs)


def measure(shape: str, work: Workload, device: str, rounds: int, deadline: float) -> dict:
    model = random_model(shape, device)
    sharpen(model)
    both = Contestants(model, work, device)
    seconds: dict[str, list[float]] = {"bf16": [], "fp8": []}
    last: dict[str, Any] = {}
    for number, name in enumerate(back_and_forth(("bf16", "fp8"), rounds)):
        if time.monotonic() > deadline and number >= 2:
            break
        elapsed, last[name] = both.run(name, work, 1 + number // 2)
        seconds[name].append(elapsed)
    prefill = {name: both.run(name, shortened(work, 1), 9)[0] for name in seconds}
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    quantized = both.quantized
    for matrix, is_on in zip(quantized.matrices, both.formats, strict=True):
        matrix.is_on = is_on
    refresh, _ = timed(lambda: [matrix.refresh() for matrix in quantized.matrices], device)
    errors = [matrix.error for matrix in quantized.matrices if matrix.error is not None]
    decode = {name: medians[name] - prefill[name] for name in medians}
    return {
        "workload": dataclasses.asdict(work),
        "seconds": seconds,
        "prefill_seconds": prefill,
        "tokens_per_second": {n: work.generated_tokens / s for n, s in medians.items()},
        "times_as_fast": medians["bf16"] / medians["fp8"],
        "times_as_fast_decoding": decode["bf16"] / decode["fp8"],
        "difference_from_training": {
            name: training_difference(model, batch[0], outputs[0])
            for name, (batch, outputs) in last.items()
        },
        "layers_in_fp8": sum(both.formats),
        "layers": len(quantized.matrices),
        "largest_layer_error": max(errors),
        "fp8_gib": quantized.num_bytes / GIB,
        "quantize_seconds": refresh,
        "products": products(model, work.sequences, device),
    }


@torch.no_grad()
def sharpen(model: PreTrainedModel) -> None:
    """Weights twice as large: logits of a random model are otherwise so flat that nothing shows."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2)


@torch.no_grad()
def products(model: PreTrainedModel, rows: int, device: str) -> dict[str, dict[str, float]]:
    """Seconds of the products of one layer for so many rows."""
    found = {}
    layer = model.model.layers[0]
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach()
            x = torch.randn(rows, weight.shape[1], device=device, dtype=weight.dtype)
            w8, scale = quantize_rows(weight)
            full = median_seconds(lambda x=x, w=weight: F.linear(x, w), device, 5)
            low = median_seconds(
                lambda x=x, w8=w8, scale=scale: fp8_product(x, w8, scale, None), device, 5
            )
            alone = median_seconds(lambda x=x: quantize_rows(x), device, 5)
            found[name] = {"bf16": full, "fp8": low, "of it quantizing": alone, "times": full / low}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=170.0, help="seconds for all shapes")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.time_limit
    work = Workload(options.prompts, options.samples, options.prompt_tokens, options.new_tokens)
    result: dict[str, Any] = {"environment": environment(options.device, 0), "shapes": {}}
    for shape in options.shapes:
        result["shapes"][shape] = measure(shape, work, options.device, options.rounds, deadline)
        write(options.out, result)
        if options.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
