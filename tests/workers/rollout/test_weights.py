"""The engine generates with the trainer's weights as they are at that moment, and says which."""

import asyncio
import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import LIMITS, build_engine, request, training_log_probs
from verl.models.exact import make_exact
from verl.workers.rollout.base import SamplingParams, TokenOutput
from verl.workers.rollout.kept_cache import KeptCacheError, kept_cache_drift
from verl.workers.rollout.native.engine import LostRequestError
from verl.workers.rollout.process.native import HostedNativeEngine
from verl.workers.rollout.trained import Answer

CAPACITY = LIMITS.max_prompt_tokens + LIMITS.max_response_tokens
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


class Policy:
    """A model whose weights change, and the count of the changes."""

    def __init__(self, exact=False):
        self._plain = tiny_model("llama", scale=0.1)
        self._exact = exact
        self.model = self.twin()
        self.version = 0
        self.versions = [self.twin()]

    def twin(self):
        model = copy.deepcopy(self._plain)
        return make_exact(model, CAPACITY) if self._exact else model

    @torch.no_grad()
    def update(self, scale=0.05):
        for parameter in self.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
        self.version += 1
        self.versions.append(self.twin())
        self.versions[-1].load_state_dict(self.model.state_dict())

    def engine(self, **options):
        return build_engine(self.model, version=lambda: self.version, **options)


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


@pytest.mark.parametrize("exact", [True, False])
def test_every_token_has_the_log_prob_of_the_version_it_is_stamped_with(exact):
    policy = Policy(exact)
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
            assert len(set(output.policy_versions)) > 2, "weights changed while it ran"
            assert output.policy_versions == sorted(output.policy_versions)
            assert output.num_preempted == len(set(output.policy_versions)) - 1
            for version, model in enumerate(policy.versions):
                said = [v == version for v in output.policy_versions]
                expected = training_log_probs(model, prompt, output.token_ids)
                drawn = torch.tensor(output.log_probs)[said]
                torch.testing.assert_close(drawn, expected[said], rtol=0, atol=0 if exact else 1e-6)


def talk_across_updates(policy, engine):
    """A response over three updates, and a second turn after another; (prompt, output) of both."""
    params = replace(PARAMS, max_tokens=14)
    running = engine.core.add(request([5, 6], params, session_ids=("s",)))
    while engine.core.scheduler.unfinished:
        engine.core.step()
        policy.update(scale=0.01)
    (first,) = running.outputs
    before = engine.core.num_prefilled_tokens
    prompt = [5, 6, *first.token_ids, 9]
    ((second,),) = engine.generate_batch([request(prompt, PARAMS, session_ids=("s",))])
    return Answer([5, 6], first), Answer(prompt, second), engine.core.num_prefilled_tokens - before


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_kept_keys_and_values_are_used_across_updates_and_the_drift_is_measured(keeps_cache):
    policy = Policy()
    engine = policy.engine(keeps_cache=keeps_cache)
    first, second, num_prefilled = talk_across_updates(policy, engine)
    num_versions = len(set(first.output.policy_versions))
    assert num_versions > 2
    assert first.output.num_preempted == (0 if keeps_cache else num_versions - 1)
    assert num_prefilled == (2 if keeps_cache else len(second.prompt_ids))
    assert set(second.output.policy_versions) == {policy.version}
    # The rest of the conversation as one response, whose first token has the oldest version.
    told = [*first.output.token_ids, 9, *second.output.token_ids]
    whole = TokenOutput(
        token_ids=told,
        log_probs=[*first.output.log_probs, 0.0, *second.output.log_probs],
        policy_versions=[*first.output.policy_versions, -1, *second.output.policy_versions],
    )

    def score(rows):
        return [
            training_log_probs(policy.model, list(r.prompt_ids), r.output.token_ids) for r in rows
        ]

    drift = kept_cache_drift(score, policy.version, [Answer([5, 6], whole)])
    assert set(drift.by_age) == {policy.version}
    assert drift.num_tokens == len(second.output.token_ids)
    if keeps_cache:
        assert drift.kl > 1e-6
        assert 0.5 < drift.by_age[policy.version].ess < 1 - 1e-6
        with pytest.raises(
            KeptCacheError, match=rf"on {drift.num_tokens} tokens \(age .*kv_max_kl"
        ):
            drift.require(drift.kl / 2)
    else:
        assert drift.kl < 1e-10
        assert drift.by_age[policy.version].ess == pytest.approx(1)
    drift.require(0.01 if not keeps_cache else 2 * drift.kl)
    assert drift.metrics()["rollout/kept_kv/kl"] == drift.kl


def test_the_drift_of_kept_keys_and_values_by_hand():
    q, p = [0.5, 0.25], [0.25, 0.5]
    output = TokenOutput(
        token_ids=[1, 2, 3], log_probs=[-9.0, *map(math.log, q)], policy_versions=[3, 5, 5]
    )
    drift = kept_cache_drift(lambda rows: [torch.tensor([0.0, *p]).log()], 5, [Answer([7], output)])
    (found,) = drift.by_age.values()
    assert (list(drift.by_age), found.num_tokens) == ([2], 2)
    assert found.kl == pytest.approx((0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 2)
    assert found.ess == pytest.approx(2.5**2 / (2 * (0.25 + 4)))
    assert found.max_difference == pytest.approx(math.log(2))
    assert kept_cache_drift(lambda rows: [], 6, [Answer([7], output)]).kl == 0


def test_a_hosted_engine_replaces_weights_under_requests_that_run():
    policy = Policy(exact=True)
    core = build_engine(policy.twin()).core
    hosted = HostedNativeEngine(core)
    hosted.submit(0, request([5, 6], replace(PARAMS, max_tokens=16)))
    tokens, log_probs, versions = [], [], []

    def take(deltas):
        for _, delta in deltas:
            tokens.extend(delta.token_ids)
            log_probs.extend(delta.log_probs)
            versions.extend([policy.version] * len(delta.token_ids))

    while hosted.has_work():
        take(hosted.step())
        if hosted.has_work():
            take(hosted.pause())
            policy.update()
            hosted.load_weights(policy.model.named_parameters())
            hosted.resume()
    assert len(set(versions)) > 3
    for version, model in enumerate(policy.versions):
        said = [v == version for v in versions]
        expected = training_log_probs(model, [5, 6], tokens)
        assert torch.equal(torch.tensor(log_probs)[said], expected[said])


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
