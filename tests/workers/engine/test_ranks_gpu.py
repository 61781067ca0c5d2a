"""The engines of several ranks on a real GPU, as the only rank of an NCCL group."""

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import tiny_config, tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine

pytestmark = pytest.mark.gpu
SGD = FSDPOptimizerConfig(lr=0.05, optimizer="SGD", weight_decay=0.0)
PASSES = [[0, 1, 2], [3, 4], [], [5, 6]]
CONFIGS = {
    "weights given back": FSDPEngineConfig(),
    "weights kept": FSDPEngineConfig(reshard_after_forward=False),
    "weights in CPU memory": FSDPEngineConfig(offload_policy=True),
    "layers gathered early": FSDPEngineConfig(forward_prefetch=True),
}


@pytest.fixture(autouse=True)
def _alone_in_a_group(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def on_gpu():
    return tiny_model("qwen2").to("cuda", torch.bfloat16)


def skeleton():
    with torch.device("meta"):
        return random_causal_lm(tiny_config("qwen2"))


def rounded():
    """In fp32, from where the bf16 model starts: what is lost in its rounding is lost in both."""
    return tiny_model("qwen2").to(torch.bfloat16).float()


def sharded(config, **options):
    return FSDPEngine(
        rounded,
        SGD,
        build_skeleton=skeleton,
        config=config,
        compute_dtype=torch.bfloat16,
        device="cuda",
        max_grad_norm=0.5,
        **options,
    )


def two_steps(engine):
    engine.initialize()
    data = batch().cuda()
    results = [engine.train_batch(data, weighted_sum, micro_batching=PASSES) for _ in range(2)]
    columns = engine.infer_batch(data, micro_batching=PASSES)
    weights = {name: w.detach().float().cpu() for name, w in engine.get_per_tensor_param()}
    return results, columns["log_probs"].cpu(), weights


@pytest.fixture(scope="module")
def on_one_device():
    return two_steps(OneDeviceEngine(on_gpu, SGD, max_grad_norm=0.5))


def assert_same(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.is_applied
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-2, abs=2e-2)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=3e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=3e-2, atol=0.1)
    for name, weight in expected[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("offload", [False, True])
def test_zero1_makes_the_steps_of_one_device(on_one_device, offload):
    memory = MemoryOptions(optimizer_offload=offload)
    engine = Zero1Engine(on_gpu, SGD, max_grad_norm=0.5, memory=memory)
    assert_same(two_steps(engine), on_one_device)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["", "again"])
def test_fsdp_makes_the_steps_of_one_device(on_one_device, config, options):
    assert_same(two_steps(sharded(config, **options)), on_one_device)


def test_weights_in_cpu_memory_leave_the_gpu():
    engine = sharded(FSDPEngineConfig(param_offload=True))
    two_steps(engine)
    assert {p.device.type for p in engine.module.parameters()} == {"cpu"}
    assert {b.device.type for b in engine.module.buffers()} == {"cuda"}
    assert {m.device.type for m in engine.optimizer.masters.values()} == {"cpu"}
