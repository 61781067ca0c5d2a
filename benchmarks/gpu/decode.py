"""How fast the built-in engine generates on one GPU, beside its floor and beside `generate`.

    python -m benchmarks.gpu.decode --out decode.json [--shape 0.5B] [--generate-pairs 5]

The whole workload, prefill included, the log-probability of every token returned. `floor` is what
the bytes and operations take at ceilings measured in the same process (`floors.py`). With
`--generate-pairs`, transformers' `generate` and the engine take turns on the same prompts with
fewer tokens; `generate` runs an unchanged module with sdpa attention and returns no log-probs.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from benchmarks.gpu.floors import DECODE_FORMULA, Counts, decode_floor
from benchmarks.gpu.measuring import (
    GIB,
    back_and_forth,
    ceilings,
    environment,
    peak_gib,
    timed,
    write,
)
from benchmarks.gpu.shapes import model_config, number_format, random_model
from benchmarks.gpu.workload import Workload, requests, workload_parser
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.head import OutputHead, token_log_probs
from verl.workers.rollout.base import GenerationRequest, TokenOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

WARM_UP_TOKENS = 32
"""Enough to capture the graphs of both batch sizes that the prompts come in with."""


class Contestant:
    """The engine on one workload; a run is a run of all of it."""

    def __init__(self, model: PreTrainedModel, work: Workload, options: argparse.Namespace) -> None:
        self.device = options.device
        self.vocabulary = model.config.vocab_size
        self.engine = NativeEngine(
            model,
            EngineLimits(
                max_num_seqs=work.sequences,
                max_prompt_tokens=work.prompt_tokens,
                max_response_tokens=work.new_tokens,
                max_prefill_tokens=16384,
                max_cache_bytes=60 << 30,
                tokens_per_step=options.tokens_per_step,
            ),
            eos_token_ids=[0],
        )

    @property
    def cache_gib(self) -> float:
        """Keys and values of all sequences; they are not in torch's allocator."""
        cache = self.engine.core.cache
        return cache.shape.bytes_per_sequence * cache.max_slots / GIB

    def run(self, work: Workload, seed: int) -> tuple[float, list[list[TokenOutput]]]:
        batch = requests(work, self.vocabulary, seed)
        seconds, outputs = timed(lambda: self.engine.generate_batch(batch), self.device)
        lengths = {len(output.log_probs) for group in outputs for output in group}
        assert lengths == {work.new_tokens}, lengths
        return seconds, outputs


def against_floor(contestant: Contestant, work: Workload, options: argparse.Namespace) -> dict:
    """All runs of the whole workload, and what they could have taken at least."""
    first, _ = contestant.run(shortened(work, WARM_UP_TOKENS), options.seed)
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds, outputs = [], []
    for number in range(options.repeats):
        elapsed, outputs = contestant.run(work, options.seed + number + 1)
        seconds.append(elapsed)
    prefill = [contestant.run(shortened(work, 1), options.seed + n)[0] for n in range(3)]
    model, median = contestant.engine.core.runner.module, statistics.median(seconds)
    limits = ceilings(options.device)
    counts = Counts.of(model.config, number_format(options.device).itemsize)
    floor = decode_floor(counts, work, **limits)
    last = requests(work, contestant.vocabulary, options.seed + options.repeats)[0]
    return {
        "batch": type(contestant.engine.core.batch).__name__,
        "warm_up_seconds": first,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "tokens_per_second": work.generated_tokens / median,
        "milliseconds_per_step": 1e3 * (median - statistics.median(prefill)) / work.new_tokens,
        "ceilings": limits,
        "floor_seconds": floor,
        "floor_formula": DECODE_FORMULA,
        "share_of_floor": floor["total"] / median,
        "peak_gib": peak_gib(options.device),
        "cache_gib": contestant.cache_gib,
        "difference_from_training": training_difference(model, last, outputs[0]),
    }


@torch.no_grad()
def training_difference(
    model: PreTrainedModel, request: GenerationRequest, outputs: Sequence[TokenOutput]
) -> dict[str, float]:
    """How far the sampled log-probs are from those of a training pass over the same tokens."""
    sequences = [list(request.prompt_ids) + output.token_ids for output in outputs]
    lengths = [len(tokens) for tokens in sequences]
    ids = torch.tensor([token for tokens in sequences for token in tokens], device=model.device)
    positions = packed_positions(lengths).to(model.device)
    hidden = hidden_states(model, ids, positions, packed_layout(model, lengths))
    log_probs, _ = token_log_probs(hidden[:-1], OutputHead.of(model), ids[1:])
    start, differences = 0, []
    for output, length in zip(outputs, lengths, strict=True):
        first = start + len(request.prompt_ids) - 1
        trained = log_probs[first : first + len(output.token_ids)]
        sampled = torch.tensor(output.log_probs, device=model.device)
        differences.append((trained - sampled).abs())
        start += length
    difference = torch.cat(differences)
    return {"mean": float(difference.mean()), "max": float(difference.max())}


def beside_generate(contestant: Contestant, work: Workload, options: argparse.Namespace) -> dict:
    """Turns of the engine and `generate` on the same prompts, after one warm-up each."""
    with torch.device(options.device):
        twin = Qwen2ForCausalLM._from_config(
            model_config(options.shape),
            attn_implementation="sdpa",
            dtype=number_format(options.device),
        ).eval()

    def ours(seed: int) -> float:
        return contestant.run(work, seed)[0]

    def theirs(seed: int) -> float:
        batch = requests(work, contestant.vocabulary, seed)
        ids = torch.tensor([r.prompt_ids for r in batch], device=options.device)
        seconds, output = timed(lambda: generate(twin, ids, work), options.device)
        assert output.shape == (work.sequences, work.prompt_tokens + work.new_tokens)
        return seconds

    runs = {"verl": ours, "generate": theirs}
    warm_up = {name: run(options.seed) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in enumerate(back_and_forth(list(runs), options.generate_pairs)):
        seconds[name].append(runs[name](options.seed + 1 + number // 2))
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    return {
        "workload": dataclasses.asdict(work),
        "warm_up_seconds": warm_up,
        "seconds": seconds,
        "tokens_per_second": {n: work.generated_tokens / s for n, s in medians.items()},
        "times_as_fast": medians["generate"] / medians["verl"],
    }


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, work: Workload) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=work.samples,
        max_new_tokens=work.new_tokens,
        pad_token_id=0,
    )


def shortened(work: Workload, new_tokens: int) -> Workload:
    return dataclasses.replace(work, new_tokens=min(new_tokens, work.new_tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--tokens-per-step", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generate-pairs", type=int, default=0)
    parser.add_argument("--generate-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    contestant = Contestant(random_model(options.shape, options.device), work, options)
    result = {
        "shape": options.shape,
        "workload": dataclasses.asdict(work),
        **against_floor(contestant, work, options),
        "environment": environment(options.device, options.seed),
    }
    write(options.out, result)
    if options.generate_pairs:
        shorter = shortened(work, options.generate_tokens)
        result["beside_generate"] = beside_generate(contestant, shorter, options)
        write(options.out, result)


if __name__ == "__main__":
    main()
