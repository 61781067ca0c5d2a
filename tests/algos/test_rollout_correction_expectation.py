"""With importance weights, samples of another policy give the gradient of this one.

Everything is enumerated: three tokens, two places, nine sequences, each with its probability under
the behaviour policy.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.algos.loss_cases import Batch, actor, loss_of
from verl.algos.rollout_correction import compute_rollout_correction_weights
from verl.config.algorithm import RolloutCorrectionConfig

NO_LIMIT = 1e6


def log_probs(logits: Tensor, sequences: Tensor) -> Tensor:
    """(B, T); the distribution of a token depends on the one before. `logits` is (V + 1, V)."""
    before = torch.cat([torch.full_like(sequences[:, :1], 3), sequences[:, :-1]], dim=1)
    return logits.log_softmax(-1)[before, sequences]


class Enumeration:
    """All sequences of `num_tokens` tokens, a policy that is trained and one that sampled."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        behaviour_logits = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        self.sequences = torch.tensor(list(product(range(3), repeat=num_tokens)))
        self.reward = torch.randn(len(self.sequences), generator=generator, dtype=torch.float64)
        self.behaviour = log_probs(behaviour_logits, self.sequences)
        self.mask = torch.ones_like(self.behaviour)

    def policy_gradient(self) -> Tensor:
        """sum_y pi(y) R(y) grad log pi(y), the exact gradient of the expected reward."""
        logits = self.logits.clone().requires_grad_()
        log_prob = log_probs(logits, self.sequences).sum(-1)
        return torch.autograd.grad((log_prob.exp() * self.reward).sum(), logits)[0]

    def batch(self, log_prob: Tensor, old_log_prob: Tensor) -> Batch:
        """A row per sequence; its advantage holds its probability under the behaviour policy."""
        probability = self.behaviour.sum(-1).exp()
        advantages = (probability * self.reward)[:, None] * self.mask
        return Batch(old_log_prob, log_prob, advantages, self.mask)


def expected_gradient(case: str, world: Enumeration, level: str | None) -> Tensor:
    """Minus the gradient of the loss, in expectation under the behaviour policy."""
    logits = world.logits.clone().requires_grad_()
    log_prob = log_probs(logits, world.sequences)
    config = actor(case, global_batch_info={"global_batch_size": 1})
    weights = None
    if case.startswith("bypass"):
        config.policy_loss.rollout_correction = RolloutCorrectionConfig(
            rollout_is=level, rollout_is_threshold=NO_LIMIT, loss_type="reinforce"
        )
        old_log_prob = world.behaviour
    else:
        old_log_prob = log_prob.detach()
        if level is not None:
            weights, _ = compute_rollout_correction_weights(
                old_log_prob - world.behaviour, world.mask, level, NO_LIMIT
            )
    batch = world.batch(log_prob, old_log_prob)
    loss, _ = loss_of(batch, config, "seq-mean-token-sum", weights)
    return -torch.autograd.grad(loss, logits)[0]


CASES = ["vanilla", "cispo", "gpg", "bypass reinforce, token"]


@pytest.mark.parametrize("case", CASES)
def test_sequence_weights_give_the_on_policy_gradient(case: str):
    world = Enumeration(num_tokens=2)
    gradient = expected_gradient(case, world, "sequence")
    torch.testing.assert_close(gradient, world.policy_gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_token_weights_give_the_on_policy_gradient_of_single_tokens(case: str):
    world = Enumeration(num_tokens=1)
    gradient = expected_gradient(case, world, "token")
    torch.testing.assert_close(gradient, world.policy_gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_without_weights_the_gradient_is_that_of_another_objective(case: str):
    world = Enumeration(num_tokens=2)
    gradient = expected_gradient(case, world, None)
    assert (gradient - world.policy_gradient()).abs().max() > 0.01


def test_ppo_clip_in_bypass_mode_is_its_own_importance_weight():
    world = Enumeration(num_tokens=1)
    logits = world.logits.clone().requires_grad_()
    log_prob = log_probs(logits, world.sequences)
    config = actor(
        "bypass ppo_clip",
        clip_ratio_low=1.0,
        clip_ratio_high=NO_LIMIT,
        clip_ratio_c=NO_LIMIT,
        global_batch_info={"global_batch_size": 1},
    )
    config.policy_loss.rollout_correction = RolloutCorrectionConfig.bypass_ppo_clip()
    loss, _ = loss_of(world.batch(log_prob, world.behaviour), config, "seq-mean-token-sum")
    gradient = -torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(gradient, world.policy_gradient(), rtol=0, atol=1e-12)
