"""GDPO and SPPO's baselines against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from verl.algos.advantages import compute_gdpo_outcome_advantage, compute_sppo_outcome_advantage
from verl.config.algorithm import AlgoConfig

INDEX = np.array(["a", "a", "b", "b"])
MASK = torch.ones(4, 2, dtype=torch.long)


def paid(*rewards: float) -> torch.Tensor:
    return torch.tensor([[0.0, reward] for reward in rewards], dtype=torch.float64)


def of_responses(found) -> list[float]:
    advantages, returns = found
    assert advantages is returns
    return advantages[:, 0].tolist()


def test_gdpo_normalises_each_reward_apart():
    """A GRPO of sums would let 100 drown 1; here both weigh as much as their spread."""
    parts = np.array([[100.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    found = of_responses(
        compute_gdpo_outcome_advantage(paid(0, 0, 0, 0), MASK, INDEX, parts, epsilon=1e-300)
    )
    # a: (1/sqrt 2, -1/sqrt 2) and (-1/sqrt 2, 1/sqrt 2) cancel; b: 0 and (1/sqrt 2, -1/sqrt 2)
    std = math.sqrt((0.5 + 0.5) / 3)
    half = math.sqrt(0.5)
    assert found == pytest.approx([0.0, 0.0, half / std, -half / std], abs=1e-12)


def test_gdpo_weighs_its_rewards():
    parts = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    config = AlgoConfig(gdpo_reward_keys=["x", "y"], gdpo_reward_weights=[3.0, 1.0])
    found = of_responses(
        compute_gdpo_outcome_advantage(paid(0, 0, 0, 0), MASK, INDEX, parts, 1e-300, config)
    )
    half = math.sqrt(0.5)
    sums = [2 * half, -2 * half, half, -half]
    std = math.sqrt(sum(s * s for s in sums) / 3)
    assert found == pytest.approx([s / std for s in sums], abs=1e-12)


def test_sppo_subtracts_the_mean_of_the_prompt():
    found = of_responses(compute_sppo_outcome_advantage(paid(1, 0, 4, 2), MASK, INDEX))
    assert found == [0.5, -0.5, 1.0, -1.0]


def test_sppo_subtracts_the_soft_mean_of_the_prompt_or_of_the_batch():
    def found(baseline: str) -> list[float]:
        config = AlgoConfig(sppo_baseline=baseline, sppo_eta=2.0)
        return of_responses(compute_sppo_outcome_advantage(paid(1, 0, 4, 2), MASK, INDEX, config))

    def soft_mean(*rewards: float) -> float:
        return math.log(sum(math.exp(2 * r) for r in rewards) / len(rewards)) / 2

    a, b, whole = soft_mean(1, 0), soft_mean(4, 2), soft_mean(1, 0, 4, 2)
    assert found("softmean") == pytest.approx([1 - a, -a, 4 - b, 2 - b], abs=1e-12)
    assert found("batch_softmean") == pytest.approx(
        [1 - whole, -whole, 4 - whole, 2 - whole], abs=1e-12
    )
