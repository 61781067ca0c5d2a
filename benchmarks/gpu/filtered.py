"""What top-k, top-p and a repetition penalty cost while the built-in engine generates.

    python -m benchmarks.gpu.filtered --out filtered.json [--shape 0.5B] [--rounds 3]

The same prompts and lengths with each of the settings, taking turns, prefill included and the
log-probability of every token returned. Random weights make flat distributions, in which top-p
keeps more tokens than it does in a trained model: the search has the most to do.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.decode import WARM_UP_TOKENS, Contestant, shortened
from benchmarks.gpu.measuring import back_and_forth, environment, timed, write
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.workload import Workload, requests, workload_parser

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "both": {"top_p": 0.9, "top_k": 50},
    "penalty 1.1": {"repetition_penalty": 1.1},
}


def seconds_of(contestant: Contestant, work: Workload, seed: int, filters: dict[str, Any]) -> float:
    batch = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, **filters))
        for request in requests(work, contestant.vocabulary, seed)
    ]
    seconds, outputs = timed(lambda: contestant.engine.generate_batch(batch), contestant.device)
    lengths = {len(output.log_probs) for group in outputs for output in group}
    assert lengths == {work.new_tokens}, lengths
    return seconds


def measure(contestant: Contestant, work: Workload, rounds: int, seed: int) -> dict[str, Any]:
    """Seconds of all runs, and tokens per second beside those without filters."""
    first = shortened(work, WARM_UP_TOKENS)
    warm_up = {n: seconds_of(contestant, first, seed, filters) for n, filters in VARIANTS.items()}
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number, name in enumerate(back_and_forth(list(VARIANTS), rounds)):
        round_seed = seed + 1 + number // len(VARIANTS)
        samples[name].append(seconds_of(contestant, work, round_seed, VARIANTS[name]))
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    return {
        "batch": type(contestant.engine.core.batch).__name__,
        "warm_up_seconds": warm_up,
        "seconds": samples,
        "variants": {
            name: {
                "tokens_per_second": work.generated_tokens / median,
                "share_of_none": medians["none"] / median,
            }
            for name, median in medians.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0], new_tokens=64)
    parser.add_argument("--tokens-per-step", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    contestant = Contestant(random_model(options.shape, options.device), work, options)
    result = {
        "shape": options.shape,
        "workload": dataclasses.asdict(work),
        **measure(contestant, work, options.rounds, options.seed),
        "environment": environment(options.device, options.seed),
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
