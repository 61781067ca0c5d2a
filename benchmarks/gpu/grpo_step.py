"""A whole GRPO step on one GPU, by phase, and what each option costs.

    python -m benchmarks.gpu.grpo_step --out step.json [--shape 0.5B] [--variants base,exact]

Variants take turns in one process (A B B A ...), after two small steps of each to warm up, one of
few tokens and one of few prompts: kernels are compiled, and memory has grown to its full size.

    base            old log-probs are the update's own; prompts are computed once per group
    old_log_probs   the same with a pass for old log-probs before the update
    whole_prompts   the same with every prompt computed once per sample
    approximate     prompts per sample, and a pass for old log-probs
    exact           the same with equal bits in rollout and training; it runs alone, for cuBLAS is
                    told how to add in the whole process
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.decode import WARM_UP_TOKENS, shortened
from benchmarks.gpu.floors import TRAINING_FORMULA, Counts, training_flops
from benchmarks.gpu.measuring import back_and_forth, ceilings, environment, medians, write
from benchmarks.gpu.policy import Policy, share_prefixes, whole_groups
from benchmarks.gpu.shapes import model_config
from benchmarks.gpu.workload import Workload, workload_parser
from verl.utils.flops_counter import get_device_flops


@dataclass(frozen=True)
class Variant:
    """A way to make a step."""

    policy: Policy
    with_old_log_probs: bool = False
    shares_prefix: bool = False

    def step(self, work: Workload, seed: int) -> dict[str, Any]:
        share_prefixes(self.policy.engine, self.shares_prefix)
        return self.policy.step(work, seed, with_old_log_probs=self.with_old_log_probs)


def build_variants(options: argparse.Namespace, work: Workload) -> dict[str, Variant]:
    """The variants asked for; those of one kind of model share one policy."""
    names = options.variants.split(",")
    if "exact" in names and len(names) > 1:
        raise SystemExit("exact holds for a whole process; run it alone: --variants exact")
    policy = Policy(options, work, is_exact="exact" in names)
    known = {
        "base": Variant(policy, shares_prefix=True),
        "old_log_probs": Variant(policy, with_old_log_probs=True, shares_prefix=True),
        "whole_prompts": Variant(policy),
        "approximate": Variant(policy, with_old_log_probs=True),
        "exact": Variant(policy, with_old_log_probs=True),
    }
    return {name: known[name] for name in names}


def narrowed(work: Workload, micro_tokens: int) -> Workload:
    """As many prompts as fill a pass."""
    pass_rows = len(whole_groups(work, micro_tokens)[0])
    return dataclasses.replace(work, prompts=max(1, pass_rows // work.samples))


def summary(
    variant: Variant, samples: list[dict[str, Any]], work: Workload, counts: Counts
) -> dict[str, Any]:
    """What the samples of one variant come to."""
    seconds = medians(samples, "seconds")
    flops = training_flops(counts, work, shares_prefix=variant.shares_prefix)
    return {
        "shares_prefix": variant.shares_prefix,
        "median_seconds": seconds,
        "peak_gib": max(sample["peak_gib"]["step"] for sample in samples),
        "generated_tokens_per_second": work.generated_tokens / seconds["generate"],
        "trained_tokens_per_second": work.tokens / seconds["forward_backward"],
        "utilisation": flops / seconds["forward_backward"] / get_device_flops(""),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--micro-tokens", type=int, default=43008)
    parser.add_argument("--tokens-per-step", type=int, default=8)
    parser.add_argument("--variants", default="base,old_log_probs,whole_prompts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    work, counts = Workload.of(options), Counts.of(model_config(options.shape))
    variants = build_variants(options, work)
    small = shortened(work, WARM_UP_TOKENS), narrowed(work, options.micro_tokens)
    warm_up = {
        name: [variant.step(part, options.seed)["seconds"] for part in small]
        for name, variant in variants.items()
    }
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number, name in enumerate(back_and_forth(list(variants), options.rounds)):
        seed = options.seed + 1 + number // len(variants)
        samples[name].append(variants[name].step(work, seed))
        result = {
            "shape": options.shape,
            "workload": dataclasses.asdict(work),
            "micro_tokens": options.micro_tokens,
            "variants": {
                name: summary(variants[name], found, work, counts)
                for name, found in samples.items()
                if found
            },
            "samples": samples,
            "warm_up_seconds": warm_up,
            "utilisation_formula": TRAINING_FORMULA,
        }
        write(options.out, result)  # a run that is cut short leaves what it has
    result["ceilings"] = ceilings(options.device)
    result["environment"] = environment(options.device, options.seed)
    write(options.out, result)


if __name__ == "__main__":
    main()
