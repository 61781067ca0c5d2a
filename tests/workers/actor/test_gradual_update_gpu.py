"""Passes beside generation on a real GPU: the host does not wait, and the numbers stay."""

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.actor.test_dp_actor import ALL_ROWS, RESPONSE, ROWS, batch
from verl.config.actor import FSDPActorConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.streams import beside_usual_work
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.gradual_update import GradualUpdate
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

pytestmark = pytest.mark.gpu
GROUPS = ((4, 5), (0, 1), (6, 7), (2, 3))


def actor():
    optimizer = FSDPOptimizerConfig(lr=0.01, weight_decay=0.0, optimizer="SGD")
    engine = OneDeviceEngine(
        lambda: tiny_model("llama").to("cuda", torch.bfloat16), optimizer, prefix_sharing=True
    )
    engine.initialize()
    return DataParallelPPOActor(FSDPActorConfig(ppo_micro_batch_size_per_gpu=4), engine)


def rows_of(built):
    data = batch()
    columns = built.compute_log_prob(data, micro_batching=ALL_ROWS, temperature=1.0)
    return data.copy().update({"old_log_probs": columns["log_probs"].cpu()})


def gradual(built):
    return GradualUpdate(built, num_rows=ROWS, num_columns=RESPONSE, temperature=1.0)


def test_adding_rows_never_waits_for_the_device():
    built = actor()
    rows = rows_of(built)
    for mode in ("default", "error"):  # the first time kernels are compiled
        step = gradual(built)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for group in GROUPS:
                step.add(rows[list(group)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.num_rows_run == ROWS


def test_passes_beside_generation_make_the_ordinary_update_and_leave_its_tokens_alone():
    ordinary, overlapped = actor(), actor()
    expected = ordinary.update_policy(
        rows_of(ordinary).cuda(), rows_per_step=ROWS, temperature=1.0, old_policy_version=0
    )
    rollout = NativeEngine(
        overlapped.engine.module,
        EngineLimits(max_num_seqs=8, max_prompt_tokens=8, max_response_tokens=64),
        eos_token_ids=[0],
        version=lambda: overlapped.engine.policy_version,
    )
    params = SamplingParams(max_tokens=64, ignore_eos=True, seed=3)
    request = GenerationRequest(request_id="a", prompt_ids=[5, 6, 7], params=params, num_samples=8)
    alone = rollout.generate_batch([request])
    rows = rows_of(overlapped)
    step = gradual(overlapped)
    with beside_usual_work(overlapped.engine.device):
        groups = rollout.submit(request)
        for group in GROUPS:
            rollout.step()
            step.add(rows[list(group)])
        while not all(group.is_finished for group in groups):
            rollout.step()
    metrics = step.finish()
    beside = [sample.output for group in groups for sample in group.samples]
    assert [output.token_ids for output in beside] == [o.token_ids for o in alone[0]]
    assert metrics == pytest.approx(expected, rel=0.02, abs=0.02)
    pairs = zip(
        ordinary.engine.module.parameters(), overlapped.engine.module.parameters(), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
