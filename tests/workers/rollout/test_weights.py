"""The engine generates with the trainer's weights as they are at that moment, and says which."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import LIMITS, build_engine, request, training_log_probs
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import LostRequestError

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


class Policy:
    """A model whose weights change, and the count of the changes."""

    def __init__(self):
        self.model = tiny_model("llama", scale=0.1)
        self.version = 0
        self.versions = [copy.deepcopy(self.model)]

    @torch.no_grad()
    def update(self):
        for parameter in self.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        self.version += 1
        self.versions.append(copy.deepcopy(self.model))

    def engine(self):
        return build_engine(self.model, version=lambda: self.version)


def test_new_weights_take_effect_at_once():
    policy = Policy()
    engine = policy.engine()
    ((before,),) = engine.generate_batch([request([5, 6], PARAMS)])
    policy.update()
    ((after,),) = engine.generate_batch([request([5, 6], PARAMS)])
    assert before.policy_versions == [0] * 12
    assert after.policy_versions == [1] * 12
    assert before.token_ids != after.token_ids
    expected = training_log_probs(policy.model, [5, 6], after.token_ids)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected, rtol=0, atol=1e-6)


def test_every_token_has_the_log_prob_of_the_version_it_is_stamped_with():
    policy = Policy()
    engine = policy.engine()
    prompts = [[5, 6], [7, 8, 9], [10]]
    submitted = [
        engine.core.add(request(ids, PARAMS, str(ids), num_samples=n))
        for ids, n in zip(prompts, (3, 1, 2), strict=True)
    ]
    while engine.core.scheduler.unfinished:
        engine.core.step()
        policy.update()
    for prompt, running in zip(prompts, submitted, strict=True):
        for output in running.outputs:
            assert len(set(output.policy_versions)) > 1, "weights changed while it ran"
            assert output.policy_versions == sorted(output.policy_versions)
            assert output.num_preempted == len(set(output.policy_versions)) - 1
            for version, model in enumerate(policy.versions):
                said = [v == version for v in output.policy_versions]
                expected = training_log_probs(model, prompt, output.token_ids)
                torch.testing.assert_close(
                    torch.tensor(output.log_probs)[said], expected[said], rtol=0, atol=2e-6
                )


def test_a_group_that_comes_back_too_long_for_one_pass_is_computed_in_several():
    outputs = []
    for max_prefill_tokens in (100, 9):
        policy = Policy()
        limits = replace(LIMITS, max_prefill_tokens=max_prefill_tokens)
        engine = build_engine(policy.model, limits, version=lambda policy=policy: policy.version)
        sizes = []
        policy.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs, sizes=sizes: sizes.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        (group,) = engine.core.add(request([5, 6, 7], PARAMS, num_samples=3)).groups
        engine.core.step()
        policy.version += 1
        sizes.clear()
        while engine.core.scheduler.unfinished:
            engine.core.step()
        # Three samples of 3 + 5 tokens: a pass of 24, padded to 32, or three of 8.
        assert sizes[:3] == ([32, 16, 16] if max_prefill_tokens == 100 else [16, 16, 16])
        assert engine.core.num_prefilled_tokens == 3 + 24
        outputs.append([sample.output for sample in group.samples])
    for one, several in zip(*outputs, strict=True):
        assert several.token_ids == one.token_ids
        assert several.log_probs == pytest.approx(one.log_probs, abs=2e-6)


def test_weights_written_without_a_new_version_are_noticed_too():
    policy = Policy()
    engine = policy.engine()
    running = engine.core.add(request([5, 6], PARAMS))
    engine.core.step()
    policy.update()
    policy.version = 0
    while engine.core.scheduler.unfinished:
        engine.core.step()
    (output,) = running.outputs
    assert output.num_preempted == 1
    expected = training_log_probs(policy.model, [5, 6], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs)[5:], expected[5:], rtol=0, atol=1e-6)


def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace():
    policy = Policy()
    engine = policy.engine()
    ((before,),) = engine.generate_batch([request([5, 6], PARAMS)])
    good = copy.deepcopy(policy.model.state_dict())
    bystander = engine.core.add(request([9], PARAMS, "bystander"))
    engine.core.step()
    with torch.no_grad():
        policy.model.model.embed_tokens.weight.fill_(torch.nan)  # so keys and values are NaN too
    with pytest.raises(FloatingPointError, match="weights; they have diverged"):
        engine.generate_batch([request([5, 6], PARAMS)])
    assert not engine.core.scheduler.unfinished
    assert isinstance(bystander.error, FloatingPointError)
    policy.model.load_state_dict(good)
    ((after,),) = engine.generate_batch([request([5, 6], PARAMS)])
    assert after.token_ids == before.token_ids
    assert after.log_probs == before.log_probs


async def test_all_who_wait_learn_why_a_step_failed_and_the_engine_goes_on():
    policy = Policy()
    engine = policy.engine()
    good = copy.deepcopy(policy.model.state_dict())
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(torch.nan)
    results = await asyncio.gather(
        *(engine.generate(request([5 + i], PARAMS, str(i))) for i in range(20)),
        return_exceptions=True,
    )
    assert len(results) == 20
    for number, error in enumerate(results):
        assert isinstance(error, LostRequestError)
        assert f"request {number} was lost" in str(error)
        assert isinstance(error.__cause__, FloatingPointError)
    policy.model.load_state_dict(good)
    (output,) = await engine.generate(request([5, 6], PARAMS))
    assert len(output.token_ids) == 12
