"""VAPO's arithmetic (arXiv:2504.05118) against numbers worked by hand, in double precision."""

import numpy as np
import pytest
import torch

from verl.algos.advantages.returns import compute_gae_advantage_return, temporal_differences
from verl.algos.components import positive_weights
from verl.config.algorithm import AlgoConfig
from verl.protocol import DataProto

EXACT = {"rtol": 0, "atol": 1e-12}


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_policys_lambda_grows_with_the_response_and_the_critics_is_its_own():
    """alpha 0.5: lambda is 1 - 1/2 for 4 tokens, and 0 for the response of 2."""
    rewards, mask = rows([0, 0, 0, 1], [0, 1, 0, 0]), rows([1, 1, 1, 1], [1, 1, 0, 0])
    values = rows([0.5, 0.25, 0.5, 0.75], [0.5, 0.25, 9, 9])
    config = AlgoConfig(lam_critic=1.0, lam_actor_alpha=0.5)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.3, config)
    # delta: -0.25, 0.25, 0.25, 0.25 and -0.25, 0.75
    long = [-0.25 + 0.5 * 0.4375, 0.25 + 0.5 * 0.375, 0.25 + 0.5 * 0.25, 0.25]
    plain = torch.tensor([*long, -0.25, 0.75], dtype=torch.float64)
    whitened = (plain - plain.mean()) / (plain.var(unbiased=True) + 1e-8).sqrt()
    near = {"rtol": 0, "atol": 1e-7}  # whitening divides counts in single precision
    torch.testing.assert_close(advantages[0], whitened[:4], **near)
    torch.testing.assert_close(advantages[1, :2], whitened[4:], **near)
    lam = torch.tensor([0.5, 0.0], dtype=torch.float64)
    sums = temporal_differences(rewards, values, mask, 1.0, lam)
    torch.testing.assert_close(sums[0], plain[:4], **EXACT)
    torch.testing.assert_close(sums[1, :2], plain[4:], **EXACT)
    torch.testing.assert_close(returns, rows([1, 1, 1, 1], [1, 1, 0, 0]), **EXACT)


def test_one_lambda_for_both_is_plain_gae():
    rewards, mask, values = rows([0, 0, 1]), rows([1, 1, 1]), rows([0.5, 0.25, 0.5])
    usual = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.5)
    told = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.5, AlgoConfig())
    assert all(torch.equal(a, b) for a, b in zip(usual, told, strict=True))
    lam = torch.tensor([0.5], dtype=torch.float64)
    sums = temporal_differences(rewards, values, mask, 0.9, lam)
    by_hand = [-0.275 + 0.45 * (0.2 + 0.45 * 0.5), 0.2 + 0.45 * 0.5, 0.5]
    torch.testing.assert_close(sums, rows(by_hand), **EXACT)


def test_right_responses_weigh_and_tool_output_does_not():
    batch = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]),
        }
    )
    assert positive_weights(batch, 0.5, 1.0).tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert positive_weights(batch, 0.5, 0.5)[1].tolist() == [0.5, 0.5, 0.0]
    batch.non_tensor_batch["acc"] = np.array([False, True], dtype=object)  # what was reported
    assert positive_weights(batch, 1.0, 1.0).tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize("key", ["lam_critic", "lam_actor_alpha"])
def test_lambdas_that_mean_nothing_are_refused(key):
    with pytest.raises(ValueError, match=key):
        AlgoConfig(**{key: -0.5})
