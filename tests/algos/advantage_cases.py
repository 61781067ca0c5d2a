"""Batches for the estimators, and a call that gives each estimator what its signature names."""

import inspect
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from verl.algos.registry import AdvantageEstimator, get_adv_estimator_fn

EVERY_ESTIMATOR = [estimator.value for estimator in AdvantageEstimator]
GROUP_ESTIMATORS = [
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
    "sppo",
]


@dataclass
class Case:
    """Every tensor is (B, T) but `reward_baselines` (B,); `index` is (B,)."""

    token_level_rewards: Tensor
    response_mask: Tensor
    index: np.ndarray
    values: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor
    reward_baselines: Tensor
    gamma: float = 0.9
    lam: float = 0.8

    def rows(self, order: list[int]) -> "Case":
        picked = {
            name: value[order]
            for name, value in vars(self).items()
            if isinstance(value, (Tensor, np.ndarray))
        }
        return replace(self, **picked)

    def with_padding(self, columns: int, fill: float) -> "Case":
        """More columns that are not trained on: no reward there, and `fill` in everything else."""
        padded = {
            name: torch.nn.functional.pad(
                value,
                (0, columns),
                value=0 if name in ("token_level_rewards", "response_mask") else fill,
            )
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.ndim == 2
        }
        return replace(self, **padded)


def estimate(name: str, case: Case) -> tuple[Tensor, Tensor]:
    function = get_adv_estimator_fn(name)
    parameters = inspect.signature(function).parameters
    return function(**{key: value for key, value in vars(case).items() if key in parameters})


def make_case(rewards: list[float], mask: list[list[int]], index: list[str], seed: int = 0) -> Case:
    """One reward per response, paid on its last trained token (on its last one if none is)."""
    response_mask = torch.tensor(mask)
    B, T = response_mask.shape
    token_level_rewards = torch.zeros(B, T)
    for row, reward in enumerate(rewards):
        trained = response_mask[row].nonzero().flatten().tolist()
        token_level_rewards[row, trained[-1] if trained else -1] = reward
    generator = torch.Generator().manual_seed(seed)
    return Case(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=np.array(index, dtype=object),
        values=torch.randn(B, T, generator=generator),
        old_log_probs=-torch.rand(B, T, generator=generator) - 0.05,
        sum_pi_squared=torch.rand(B, T, generator=generator) * 0.9 + 0.05,
        rollout_is_weights=torch.rand(B, T, generator=generator) + 0.5,
        reward_baselines=torch.randn(B, generator=generator),
    )


@st.composite
def cases(draw: st.DrawFn, equal_in_group: bool = False) -> Case:
    """Up to three prompts of two to four responses each, in any order, with any mask."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    index = [f"p{prompt}" for prompt, size in enumerate(sizes) for _ in range(size)]
    index = draw(st.permutations(index))
    T = draw(st.integers(1, 5))
    mask = draw(
        st.lists(
            st.lists(st.integers(0, 1), min_size=T, max_size=T),
            min_size=len(index),
            max_size=len(index),
        )
    )
    reward = st.floats(-3, 3, width=32)
    if equal_in_group:
        of_prompt = {label: draw(reward) for label in sorted(set(index))}
        rewards = [of_prompt[label] for label in index]
    else:
        rewards = draw(
            st.lists(
                st.integers(-8, 8).map(lambda n: n / 4), min_size=len(index), max_size=len(index)
            )
        )
    return make_case(rewards, mask, index, seed=draw(st.integers(0, 1000)))
