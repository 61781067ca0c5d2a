"""Memory on a real GPU: what is offloaded leaves it, and the numbers stay."""

import copy
import gc

import pytest
import torch
from torch import nn

from tests.tiny_models import tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.fuse import FusedAttention, FusedGate, fuse_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.memory import CudaMemory, MemoryOptions, full_rows
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.optimizer import MasterOptimizer

pytestmark = pytest.mark.gpu
CUT = MicroBatching(rows=3)
ADAM = FSDPOptimizerConfig(lr=0.01, weight_decay=0.1)


def built(
    optimizer=ADAM,
    dtype=torch.bfloat16,
    checkpointing=False,
    shape=None,
    is_fused=False,
    **memory,
):
    def build_model():
        model = tiny_model("llama", **(shape or {})).to("cuda", dtype)
        assert fuse_model(model) if is_fused else True
        return model

    engine = OneDeviceEngine(
        build_model,
        optimizer,
        memory=MemoryOptions(**memory),
        gradient_checkpointing=checkpointing,
    )
    engine.initialize()
    return engine


def many_rows(num_rows, prompt_columns=100, response_columns=150):
    data = full_rows(batch(2, prompt_columns, response_columns), num_rows, 90).cuda()
    data["weight"] = torch.ones_like(data["response_mask"], dtype=torch.float32)
    return data


def test_cuda_memory_counts_what_was_allocated_and_given_back():
    memory = CudaMemory(torch.device("cuda"))
    memory.reset_peak()
    before = memory.peak_bytes()
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del block
    assert memory.peak_bytes() - before == pytest.approx(1 << 28, rel=0.05)
    assert memory.total_bytes > 1 << 30


def steps(optimizer, weight):
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(3):
        weight.grad = torch.randn(
            weight.shape, generator=generator, device="cuda", dtype=weight.dtype
        )
        optimizer.step(max_norm=1.0)
    return optimizer.masters["weight"].detach().cpu(), weight.detach().cpu()


def test_an_optimizer_whose_state_waits_in_cpu_memory_makes_the_same_steps():
    results = []
    for offload in (False, True):
        weight = nn.Parameter(torch.ones(1 << 20, device="cuda", dtype=torch.bfloat16))
        address = weight.data_ptr()
        optimizer = MasterOptimizer([("weight", weight)], ADAM, offload=offload)
        assert optimizer.optimizer.defaults["fused"]
        results.append(steps(optimizer, weight))
        assert weight.data_ptr() == address
        state = optimizer.optimizer.state[optimizer.masters["weight"]]
        where = {t.device.type for t in (optimizer.masters["weight"], state["exp_avg"])}
        assert where == ({"cpu"} if offload else {"cuda"})
        assert state["exp_avg"].is_pinned() == offload
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_user_may_choose_another_form_of_adam():
    config = FSDPOptimizerConfig(lr=0.01, override_optimizer_config={"foreach": True})
    weight = nn.Parameter(torch.ones(8, device="cuda"))
    assert not MasterOptimizer([("weight", weight)], config).optimizer.defaults["fused"]


def allocated_bytes():
    gc.collect()
    return torch.cuda.memory_allocated()


def joined_layers(engine):
    forwards = [module.forward for module in engine.module.modules()]
    return [f.joined for f in forwards if isinstance(f, FusedAttention | FusedGate)]


def test_offloaded_weights_take_no_room_on_the_gpu_and_score_the_same():
    options = {
        "optimizer": None,
        "is_fused": True,
        "shape": {"hidden_size": 1024, "intermediate_size": 8192, "scale": 0.02},
    }
    plain = built(**options)
    expected = plain.infer_batch(batch().cuda(), micro_batching=CUT)  # workspaces exist now
    num_bytes = sum(p.nbytes for p in plain.module.parameters())
    before = allocated_bytes()
    offloaded = built(**options, param_offload=True)
    assert all(p.is_pinned() for p in offloaded.module.parameters())
    assert allocated_bytes() - before < num_bytes / 20
    with offloaded.residency.in_use():
        assert num_bytes <= allocated_bytes() - before < 1.2 * num_bytes, "there once"
        assert len(joined_layers(offloaded)) == 4
        assert all(joined.is_whole for joined in joined_layers(offloaded))
    found = offloaded.infer_batch(batch().cuda(), micro_batching=CUT)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(p.device.type == "cpu" for p in offloaded.module.parameters())
    assert allocated_bytes() - before < num_bytes / 20


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_model_with_offloaded_weights_trains(is_fused):
    engine = built(param_offload=True, optimizer_offload=True, is_fused=is_fused)
    before = [p.detach().clone() for p in engine.module.parameters()]
    for _ in range(2):
        assert engine.train_batch(batch().cuda(), weighted_sum, micro_batching=CUT).is_applied
    moved = [not torch.equal(a, b) for a, b in zip(engine.module.parameters(), before, strict=True)]
    assert all(moved)


@pytest.mark.parametrize("optimizer_offload", [False, True])
def test_a_resumed_fp32_model_with_offloaded_weights_makes_its_next_step(optimizer_offload):
    options = {"param_offload": True, "optimizer_offload": optimizer_offload}
    first, second = (built(dtype=torch.float32, **options) for _ in range(2))
    data = batch().cuda()
    assert first.train_batch(data, weighted_sum, micro_batching=CUT).is_applied
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    home = "cpu" if optimizer_offload else "cuda"
    for moments in second.optimizer.optimizer.state.values():
        assert moments["exp_avg"].device.type == home
    for a, b in zip(second.module.parameters(), first.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.train_batch(data, weighted_sum, micro_batching=CUT).is_applied


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_lower_the_peak_and_keep_the_gradient(checkpointing):
    peaks, norms = [], []
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    data = many_rows(64)
    for offload in (False, True):
        engine = built(
            checkpointing=checkpointing, shape=shape, activation_offload=offload, optimizer=ADAM
        )
        gc.collect()
        torch.cuda.reset_peak_memory_stats()  # of this process; `CudaMemory` counts its neighbours
        result = engine.train_batch(data, weighted_sum, micro_batching=MicroBatching(rows=64))
        peaks.append(torch.cuda.max_memory_allocated())
        norms.append(result.grad_norm)
        del engine
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert peaks[1] < peaks[0]


def test_a_step_in_fp16_is_applied_after_the_scale_has_settled():
    engine = built(dtype=torch.float16)
    results = [
        engine.train_batch(batch().cuda(), weighted_sum, micro_batching=CUT) for _ in range(12)
    ]
    assert results[-1].is_applied
    assert results[-1].loss_scale is not None


def test_a_real_out_of_memory_is_survived_and_remembered():
    engine = built(shape={"hidden_size": 512, "num_hidden_layers": 4})
    data = many_rows(8000)
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        first, second = (
            engine.train_batch(data, weighted_sum, micro_batching=MicroBatching(rows=8000))
            for _ in range(2)
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert first.num_oom_splits > 0
    assert second.num_oom_splits == 0
    assert first.is_applied
    assert second.is_applied


def test_a_probed_micro_batch_is_larger_than_a_small_configured_one(caplog):
    engine = built(probe_micro_batch=True)
    result = engine.train_batch(many_rows(64), weighted_sum, micro_batching=MicroBatching(rows=1))
    assert result.num_micro_batches < 64
    assert result.num_oom_splits == 0
    assert "micro-batches have up to" in caplog.text


def test_losses_and_reports_are_read_once_after_the_last_pass():
    """A read inside a pass would make the host wait; with the mode on, every read is an error."""
    engine = built()
    data = batch().cuda()

    def loss(columns, rows):
        torch.cuda.set_sync_debug_mode("error")
        try:
            value, report = weighted_sum(columns, rows)
            return value, {**report, "mean": value.detach()}
        finally:
            torch.cuda.set_sync_debug_mode("default")

    result = engine.train_batch(data, loss, micro_batching=CUT)
    assert all(report["mean"].is_cuda for report in result.metrics)


def test_an_engine_that_is_dropped_gives_its_memory_back():
    def allocated_after_a_run():
        engine = built(is_fused=True, shape={"hidden_size": 256, "intermediate_size": 512})
        engine.train_batch(many_rows(4), weighted_sum, micro_batching=CUT)
        during = torch.cuda.memory_allocated()
        del engine
        gc.collect()
        return during - torch.cuda.memory_allocated(), torch.cuda.memory_allocated()

    _, before = allocated_after_a_run()  # what libraries keep for good is there afterwards
    given_back, after = allocated_after_a_run()
    assert given_back > 1 << 20
    assert after <= before
