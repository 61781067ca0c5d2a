"""What a step gains when rewards and passes run beside the tail of generation.

    python -m benchmarks.gpu.overlap --out overlap.json [--shape 0.5B] [--rounds 2]

Response lengths are forced and heavy-tailed, one per prompt: lognormal with a median of 150 and a
cap of `--new-tokens`. So most groups end early and a few decode for long, on a device that is
nearly idle. Variants take turns in one process (A B C D, D C B A, ...):

    updates_after        rewards as groups end, passes when all have ended
    updates_beside       rewards as groups end, passes as soon as they are full
    rewards_after        as updates_after, but rewards when all have ended; a slow reward
    rewards_beside       as updates_after; the slow reward as groups end

Rewards are found in processes, as by the reward managers; the slow one works for 5 ms per response.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.gpu.measuring import back_and_forth, environment, peak_gib, synchronize, write
from benchmarks.gpu.policy import Policy, share_prefixes
from benchmarks.gpu.workload import Workload, requests, reward, workload_parser
from verl.algos.advantages.group_relative import compute_grpo_outcome_advantage
from verl.utils.streams import beside_usual_work
from verl.workers.actor.gradual_update import GradualUpdate
from verl.workers.reward_manager.grader import Score
from verl.workers.reward_manager.worker_pool import WorkerPool
from verl.workers.rollout.base import GenerationRequest, TokenOutput
from verl.workers.rollout.sequences import pad_floats, padded_sequences

MEDIAN_TOKENS, SPREAD = 150, 1.0
SLOW_SECONDS = 0.005


@dataclass(frozen=True)
class Variant:
    """When the parts of a step happen."""

    updates_beside: bool = False
    rewards_beside: bool = True
    reward_seconds: float = 0.0


VARIANTS = {
    "updates_after": Variant(),
    "updates_beside": Variant(updates_beside=True),
    "rewards_after": Variant(rewards_beside=False, reward_seconds=SLOW_SECONDS),
    "rewards_beside": Variant(reward_seconds=SLOW_SECONDS),
}


def heavy_tailed(work: Workload, seed: int) -> list[int]:
    """A length for each prompt; the median shrinks with the cap."""
    rng = random.Random(f"lengths {seed}")
    middle = min(MEDIAN_TOKENS, max(2, work.new_tokens // 4))
    drawn = (middle * rng.lognormvariate(0.0, SPREAD) for _ in range(work.prompts))
    return [max(2, min(work.new_tokens, round(length))) for length in drawn]


def busy_reward(*, text: str, seconds: float) -> float:
    """The rule of the other benchmarks, after some work of the processor."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))
    return reward(text)


class RewardProcesses:
    """Rewards of texts, found in processes. They are forks: made before the device is touched."""

    def __init__(self) -> None:
        self.num_processes = max(1, min(12, (os.cpu_count() or 1) - 2))
        self._pool = WorkerPool(busy_reward, timeout_seconds=60.0)
        self._threads = ThreadPoolExecutor(self.num_processes)

    async def of(self, outputs: Sequence[TokenOutput], seconds: float) -> list[float]:
        loop = asyncio.get_running_loop()
        texts = [" ".join(f"t{token}" for token in output.token_ids) for output in outputs]
        calls = [{"text": text, "seconds": seconds} for text in texts]
        grades = await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._pool.call, call) for call in calls)
        )
        assert all(isinstance(grade, Score) for grade in grades), grades
        return [grade.value for grade in grades if isinstance(grade, Score)]

    def close(self) -> None:
        self._threads.shutdown()
        self._pool.close()


@dataclass
class Group:
    """The responses to one prompt."""

    request: GenerationRequest
    outputs: list[TokenOutput]
    rewards: list[float]

    def rows(self, work: Workload) -> TensorDict:
        """As a trainer makes them: padded, in CPU memory, with advantages."""
        responses = [output.token_ids for output in self.outputs]
        columns = padded_sequences(
            [list(self.request.prompt_ids)] * len(responses),
            responses,
            [[1] * len(response) for response in responses],
            prompt_length=work.prompt_tokens,
            response_length=work.new_tokens,
            pad_token_id=0,
        )
        log_probs = [output.log_probs for output in self.outputs]
        columns["old_log_probs"] = pad_floats(log_probs, work.new_tokens)
        scores = torch.zeros_like(columns["old_log_probs"])
        scores[:, 0] = torch.tensor(self.rewards)
        columns["advantages"], _ = compute_grpo_outcome_advantage(
            scores, columns["response_mask"], np.zeros(len(responses), dtype=int)
        )
        return TensorDict(columns, batch_size=len(responses))


class OverlapStep:
    """One step of a variant, with a clock."""

    def __init__(self, policy: Policy, rewards: RewardProcesses, work: Workload) -> None:
        self.policy, self.rewards, self.work = policy, rewards, work
        self.device = policy.engine.device

    def run(self, variant: Variant, seed: int) -> dict[str, Any]:
        policy, work = self.policy, self.work
        synchronize(policy.device)
        if policy.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        gradual = None
        if variant.updates_beside:
            gradual = GradualUpdate(
                policy.actor, num_rows=work.sequences, num_columns=work.new_tokens, temperature=1.0
            )
        with nullcontext() if gradual is None else beside_usual_work(self.device):
            groups = asyncio.run(self._generate(variant, gradual, seed))
        ended, num_overlapped = self._ended - start, self._num_overlapped
        policy.rollout.sleep()
        metrics = self._update(groups) if gradual is None else gradual.finish()
        synchronize(policy.device)
        whole = time.perf_counter() - start
        cache = policy.cache_gib if policy.device != "cpu" else 0.0
        return {
            "seconds": {"step": whole, "generate": ended, "after_generation": whole - ended},
            "peak_gib": peak_gib(policy.device) + cache,
            "overlapped_rows_ratio": num_overlapped / work.sequences,
            "metrics": {name: float(value) for name, value in metrics.items()},
        }

    async def _generate(
        self, variant: Variant, gradual: GradualUpdate | None, seed: int
    ) -> list[Group]:
        batch = requests(self.work, self.policy.vocabulary, seed)
        self._num_left = len(batch)
        groups = await asyncio.gather(
            *(
                self._follow(dataclasses.replace(request, params=params), variant, gradual)
                for request, length in zip(batch, heavy_tailed(self.work, seed), strict=True)
                for params in [dataclasses.replace(request.params, max_tokens=length)]
            )
        )
        if not variant.rewards_beside:
            outputs = [output for group in groups for output in group.outputs]
            found = iter(await self.rewards.of(outputs, variant.reward_seconds))
            for group in groups:
                group.rewards = [next(found) for _ in group.outputs]
        return groups

    async def _follow(
        self, request: GenerationRequest, variant: Variant, gradual: GradualUpdate | None
    ) -> Group:
        group = Group(request, await self.policy.rollout.generate(request), [])
        self._num_left -= 1
        if self._num_left == 0:
            self._ended = time.perf_counter()
            self._num_overlapped = 0 if gradual is None else gradual.num_rows_run
        if variant.rewards_beside:
            group.rewards = await self.rewards.of(group.outputs, variant.reward_seconds)
        if gradual is not None:
            gradual.add(group.rows(self.work))
        return group

    def _update(self, groups: list[Group]) -> dict[str, Any]:
        rows = TensorDict.cat([group.rows(self.work) for group in groups])
        return self.policy.actor.update_policy(
            rows,
            rows_per_step=len(rows),
            temperature=1.0,
            old_policy_version=self.policy.engine.policy_version,
        )


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    names = samples[0]["seconds"]
    return {
        "median_seconds": {
            name: statistics.median(sample["seconds"][name] for sample in samples) for name in names
        },
        "peak_gib": max(sample["peak_gib"] for sample in samples),
        "overlapped_rows_ratio": statistics.median(
            sample["overlapped_rows_ratio"] for sample in samples
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser((__doc__ or "").partition("\n")[0], new_tokens=1024)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--steps-per-visit", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    rewards = RewardProcesses()
    try:
        measure(options, rewards)
    finally:
        rewards.close()


def measure(options: argparse.Namespace, rewards: RewardProcesses) -> None:
    work = Workload.of(options)
    policy = Policy(options, work, is_exact=False)
    share_prefixes(policy.engine, True)
    step = OverlapStep(policy, rewards, work)
    # Whole steps: batches of every size are captured as rows end.
    warm_up = {
        name: step.run(VARIANTS[name], options.seed)["seconds"]
        for name in ("updates_after", "updates_beside")
    }
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    result: dict[str, Any] = {}
    for number, name in enumerate(back_and_forth(list(VARIANTS), options.rounds)):
        seed = options.seed + 1 + number // len(VARIANTS)
        samples[name].append(step.run(VARIANTS[name], seed))
        result = {
            "shape": options.shape,
            "workload": dataclasses.asdict(work),
            "micro_tokens": options.micro_tokens,
            "reward_processes": rewards.num_processes,
            "mean_response_tokens": statistics.mean(heavy_tailed(work, options.seed + 1)),
            "variants": {name: summary(found) for name, found in samples.items() if found},
            "samples": samples,
            "warm_up_seconds": warm_up,
        }
        write(options.out, result)  # a run that is cut short leaves what it has
    result["environment"] = environment(options.device, options.seed)
    write(options.out, result)


if __name__ == "__main__":
    main()
