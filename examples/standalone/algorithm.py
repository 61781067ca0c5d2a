"""GRPO in thirty lines: run this file. `python examples/standalone/algorithm.py`

sample -> score -> compare answers to the same prompt -> make the better ones likelier
"""

import argparse
import random
from collections.abc import Iterator

import numpy as np
import torch
from env import sample_prompts, score
from inference import Sampler
from training import as_batch, build_actor, build_engine

from verl.algos.advantages.group_relative import compute_grpo_outcome_advantage


def train(
    *, steps: int, num_prompts: int = 32, num_samples: int = 16, seed: int = 0
) -> Iterator[float]:
    """Give the mean reward of the sampled answers after each step."""
    rng = random.Random(seed)
    engine = build_engine(learning_rate=5e-3, seed=seed)
    sampler, actor = Sampler(engine), build_actor(engine)
    for _ in range(steps):
        prompts = sample_prompts(num_prompts, rng)
        groups = sampler.generate(prompts, num_samples=num_samples)
        rows = [(p, output) for p, group in zip(prompts, groups, strict=True) for output in group]
        batch = as_batch(rows)
        rewards = torch.tensor([score(prompt, output.token_ids) for prompt, output in rows])
        mask = batch["response_mask"]
        token_rewards = torch.zeros(mask.shape)
        token_rewards[torch.arange(len(rows)), mask.sum(1) - 1] = rewards
        groups_of_rows = np.repeat(np.arange(num_prompts), num_samples)
        batch["advantages"], _ = compute_grpo_outcome_advantage(token_rewards, mask, groups_of_rows)
        actor.update_policy(
            batch,
            rows_per_step=len(rows),
            temperature=1.0,
            old_policy_version=engine.policy_version,
        )
        yield float(rewards.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Teach a random model to count on.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for step, reward in enumerate(train(steps=arguments.steps, seed=arguments.seed), start=1):
        if step % 10 == 0 or step == 1:
            print(f"step {step:3}  reward {reward:.2f}  {'#' * round(40 * reward)}", flush=True)
