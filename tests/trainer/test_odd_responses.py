"""Responses without tokens, of one end token, of full length, of padding: a step stays finite."""

import math

import pytest
import torch

from tests.toy import ACTOR, ROLLOUT, toy_run, weights
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from verl.models.loading import load_causal_lm

MAX_TOKENS = 8


@register("odd_for_tests")
class Odd(AgentLoopBase):
    """Says what the first letter of the prompt's row demands, without a model."""

    async def run(self, sampling_params, **kwargs):
        index = kwargs["extra_info"]["index"]
        tokenizer = self.tokenizer
        word = tokenizer("7").input_ids[-1]
        seed = sampling_params["seed"] % 3
        response, mask = [
            ([], []),
            ([tokenizer.eos_token_id], [1]),
            ([word] * MAX_TOKENS, [1] * MAX_TOKENS),
            ([tokenizer.pad_token_id] * 3, [0] * 3),
            ([word] * (1 + seed), [1] * (1 + seed)),  # something to learn from
        ][index % 5]
        return AgentLoopOutput(
            prompt_ids=await self.apply_chat_template(kwargs["raw_prompt"]),
            response_ids=response,
            response_mask=mask,
            response_logprobs=[-1.0] * len(response),
            num_turns=2,
            metrics={},
        )


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_odd_responses_have_a_finite_loss_and_gradient(toy, tmp_path, estimator, aggregation):
    changes = (
        f"algorithm.adv_estimator={estimator}",
        f"{ACTOR}.loss_agg_mode={aggregation}",
        f"{ROLLOUT}.agent.default_agent_loop=odd_for_tests",
        "data.shuffle=false",
        "data.train_batch_size=5",
        f"{ACTOR}.ppo_mini_batch_size=1",  # mini-batches that hold no token at all
        "trainer.total_training_steps=1",
    )
    (metrics,), trainer = toy_run(toy, tmp_path, *changes)
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    assert [name for name, value in numbers.items() if not math.isfinite(value)] == []
    assert "tripwire/non_finite" not in metrics
    assert metrics["response_length/min"] == 0
    assert (trainer.batch.batch["response_mask"].sum(1) == 0).any()
    start = dict(load_causal_lm(str(toy / "model")).named_parameters())
    after = weights(trainer)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in after.items())
