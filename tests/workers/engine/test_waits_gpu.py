"""On a real GPU: no pass waits for the device, wherever the rows of the batch are."""

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import fuse_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.forward import rows_on_host
from verl.workers.engine.one_device import OneDeviceEngine

pytestmark = pytest.mark.gpu


def fused_model():
    model = tiny_model("qwen2").to("cuda", torch.bfloat16)
    fuse_model(model)
    return model


def test_rows_are_packed_in_cpu_memory_although_their_batch_is_on_the_gpu():
    data = batch(7).to("cuda")
    on_host = rows_on_host(data)
    assert on_host["input_ids"].device.type == on_host["attention_mask"].device.type == "cpu"
    assert on_host["weight"].device.type == data["input_ids"].device.type == "cuda"


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_no_training_pass_waits_for_the_device(shares_prompts):
    engine = OneDeviceEngine(
        fused_model, FSDPOptimizerConfig(lr=0.01), prefix_sharing=shares_prompts
    )
    engine.initialize()
    data, cut = batch(7).to("cuda"), MicroBatching(rows=3)
    engine.train_batch(data, weighted_sum, micro_batching=cut)  # kernels are compiled
    own_pass = engine._train_pass

    def watched_pass(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return own_pass(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._train_pass = watched_pass
    engine.train_batch(data, weighted_sum, micro_batching=cut)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_scoring_waits_for_nothing_but_what_its_caller_reads(shares_prompts):
    engine = OneDeviceEngine(fused_model, prefix_sharing=shares_prompts)
    engine.initialize()
    data, cut = batch(7), MicroBatching(rows=3)
    expected = engine.infer_batch(data, micro_batching=cut)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = engine.infer_batch(data, micro_batching=cut)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
