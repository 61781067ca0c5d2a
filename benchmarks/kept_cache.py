"""Keys and values kept across updates against recomputed ones: KL, effective sample size, speed.

    python -m benchmarks.kept_cache --model runs/smollm2/model --out kept.json
    python -m benchmarks.kept_cache --shape 0.5B --device cuda --segment 64 --out kept.json

Responses run on while the policy is updated every `--segment` tokens, as in asynchronous training:
one PPO step at learning rate `--rates` on what was sampled since the last update, with advantages
of +1 for half of the rows and -1 for the others. After each update the next tokens are drawn over
kept keys and values; they are `age` updates old where they are oldest. What recomputed ones give
for these tokens comes from a training pass (`verl.workers.rollout.kept_cache`). Speed is that of
the segment that follows an update, with what is computed again; `stall` is how much longer the
first step after an update takes than the others. With `--shape` weights are random: then stalls and
speeds mean something, divergences do not. `behaviour` is the KL between the
weights that draw a token and those that drew the first of its row, over recomputed keys and values:
the staleness that any asynchronous run has and that corrections are for.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.gpu.measuring import environment, synchronize, timed
from benchmarks.gpu.policy import as_rows
from benchmarks.gpu.shapes import random_model
from verl.config.actor import FSDPActorConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import load_causal_lm
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenOutput
from verl.workers.rollout.kept_cache import kept_cache_drift
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.trained import Answer, log_probs_of

SUBJECTS = ("rivers", "bread", "clocks", "snow", "trains", "cats", "maps", "glass")


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Of one length: the ends of the longer ones."""
    if options.model is None:
        return [[7 + number] * 32 for number in range(options.prompts)]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Tell me a long story about {subject}."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for subject in SUBJECTS
    ]
    return [one[-min(map(len, ids)) :] for one in ids][: options.prompts]


class Run:
    """One model under training, and an engine that goes on across its updates."""

    def __init__(self, options: argparse.Namespace, rate: float, *, keeps_cache: bool) -> None:
        self.options = options
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16

        def build() -> Any:
            if options.model is None:
                return random_model(options.shape, options.device)
            return load_causal_lm(str(options.model), dtype=dtype, device=options.device)

        self.trained = OneDeviceEngine(build, FSDPOptimizerConfig(lr=rate))
        self.first = OneDeviceEngine(build)
        for engine in (self.trained, self.first):
            engine.initialize()
        longest = options.segment * (options.ages + 1)
        self.requests = [
            GenerationRequest(
                request_id=str(number),
                prompt_ids=ids,
                params=SamplingParams(max_tokens=longest, seed=number, ignore_eos=True),
                num_samples=options.samples,
            )
            for number, ids in enumerate(prompts(options))
        ]
        self.engine = NativeEngine(
            self.trained.module,
            EngineLimits(
                max_num_seqs=len(self.requests) * options.samples,
                max_prompt_tokens=len(self.requests[0].prompt_ids),
                max_response_tokens=longest,
                tokens_per_step=min(4, options.segment),
            ),
            eos_token_ids=[0],
            version=lambda: self.trained.policy_version,
            keeps_cache=keeps_cache,
        )
        config = FSDPActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=options.tokens)
        self.actor = DataParallelPPOActor(config, self.trained)

    def ages(self) -> list[dict[str, Any]]:
        """Of every age from 0 on."""
        core, options = self.engine.core, self.options
        running = [core.add(request) for request in self.requests]
        found = []
        for age in range(options.ages + 1):
            goal = options.segment * (age + 1)
            before = sum(len(out.token_ids) for run in running for out in run.outputs)

            steps = []
            while any(len(out.token_ids) < goal for run in running for out in run.outputs):
                steps.append(timed(core.step, options.device)[0])
            seconds, stall = sum(steps), steps[0] - median(steps[1:] or steps)
            rows = [
                Answer(request.prompt_ids, copy.deepcopy(output))
                for request, run in zip(self.requests, running, strict=True)
                for output in run.outputs
            ]
            tokens = sum(len(row.output.token_ids) for row in rows) - before
            found.append(
                {
                    "age": age,
                    "tokens_per_second": tokens / seconds,
                    "stall": stall,
                    **self.drift(rows),
                }
            )
            if age < options.ages:
                self.update([[row.output for row in rows]])
        synchronize(options.device)
        return found

    def drift(self, rows: Sequence[Answer]) -> dict[str, float]:
        """Kept against recomputed, and the first weights against these."""
        version = self.trained.policy_version
        drift = kept_cache_drift(self.score, version, rows)
        (of_age,) = drift.by_age.values()
        fresh, old = self.score(rows), log_probs_of(self.first, rows, temperature=1.0)
        said = [torch.tensor(row.output.policy_versions) == version for row in rows]
        ratios = torch.cat(
            [(o - f)[mask] for o, f, mask in zip(old, fresh, said, strict=True)]
        ).double()
        behaviour = float((ratios.exp() - 1 - ratios).mean())
        return {"kl": of_age.kl, "ess": of_age.ess, "max_difference": of_age.max_difference,
                "behaviour_kl": behaviour, "num_tokens": of_age.num_tokens}  # fmt: skip

    def score(self, rows: Sequence[Answer]) -> list[torch.Tensor]:
        return log_probs_of(self.trained, rows, temperature=1.0)

    def update(self, outputs: list[list[TokenOutput]]) -> None:
        """One step on the tokens of the newest version."""
        version, (flat,) = self.trained.policy_version, outputs
        grouped = [
            flat[start : start + self.options.samples]
            for start in range(0, len(flat), self.options.samples)
        ]
        same = min(len(output.token_ids) for output in flat)
        cut = [
            [replace(o, token_ids=o.token_ids[:same], log_probs=o.log_probs[:same],
                     policy_versions=o.policy_versions[:same]) for o in group]
            for group in grouped
        ]  # fmt: skip
        rows = as_rows(self.requests, cut)
        newest = torch.tensor([[v == version for v in o.policy_versions] for g in cut for o in g])
        rows["response_mask"] = newest.to(rows["response_mask"].dtype)
        sign = torch.arange(len(rows)) % 2 * 2.0 - 1
        rows["advantages"] = sign[:, None].expand_as(rows["old_log_probs"]).contiguous()
        self.actor.update_policy(
            rows, rows_per_step=len(rows), temperature=1.0, old_policy_version=version
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path)
    which.add_argument("--shape", help="a model of random weights: 0.5B, ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--ages", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--segment", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="of one training pass")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    columns = ("learning rate", "age", "KL of kept", "ESS", "KL of weights", "tok/s kept",
               "recomputed", "stall ms kept", "recomputed")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for rate in options.rates:
        kept = Run(options, rate, keeps_cache=True).ages()
        again = Run(options, rate, keeps_cache=False).ages()
        for line, other in zip(kept, again, strict=True):
            found.append({"rate": rate, "kept": line, "recomputed": other})
            print(
                f"| {rate:g} | {line['age']} | {line['kl']:.2g} | {line['ess']:.4f} | "
                f"{line['behaviour_kl']:.2g} | {line['tokens_per_second']:.0f} | "
                f"{other['tokens_per_second']:.0f} | {1000 * line['stall']:.1f} | "
                f"{1000 * other['stall']:.1f} |",
                flush=True,
            )
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        result = {"options": shown, "lines": found, "environment": environment(options.device, 0)}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
