import ast
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verl
from tests.tiny_tokenizer import save_tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils import device
from verl.utils.checkpoint.checkpoint_manager import capture_rng, restore_rng
from verl.utils.device import (
    NEW_OBJECTS,
    auto_set_device,
    check_cpu_bf16,
    collect_seldom,
    collecting_seldom,
    free_cached_memory,
    get_device_capability,
    get_device_id,
    get_device_name,
    get_nccl_backend,
    get_torch_device,
    get_visible_devices_keyword,
    memory_info,
    peak_memory,
    resolve_device,
    rng_states,
    set_expandable_segments,
    set_rng_states,
    synchronize,
)
from verl.utils.environment import temp_env_var
from verl.workers.engine import EngineRegistry, EngineSpec

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")


def test_the_device_can_be_forced():
    with temp_env_var("VERL_FORCE_DEVICE", "NPU"):
        assert get_device_name() == "npu"
        assert get_nccl_backend() == "hccl"
        assert get_visible_devices_keyword() == "ASCEND_RT_VISIBLE_DEVICES"
    with temp_env_var("VERL_FORCE_DEVICE", "cuda"):
        assert get_nccl_backend() == "nccl"
        assert get_torch_device() is torch.cuda
        assert get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"
    with (
        temp_env_var("VERL_FORCE_DEVICE", "gpu"),
        pytest.raises(ValueError, match="'gpu'; it must be one of: cuda, npu, cpu"),
    ):
        get_device_name()


def test_everything_follows_from_the_cpu():
    with temp_env_var("VERL_FORCE_DEVICE", "cpu"):
        assert resolve_device("auto") == resolve_device(None) == "cpu"
        assert get_torch_device() is torch.cpu
        assert get_device_id() == 0
        assert get_nccl_backend() == "gloo"
        assert get_device_capability() == (None, None)
        set_expandable_segments(True)  # nothing to set
        synchronize(torch.device("cpu"))  # nothing to wait for
        free_cached_memory()
        assert peak_memory() is None
        assert rng_states() == []


@without_cuda
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'cuda' was asked for.*trainer\.device=auto or cpu"):
        resolve_device("cuda")
    assert resolve_device("cpu") == "cpu"


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'gpu'; it must be one of: auto, cuda, npu, cpu"):
        resolve_device("gpu")


@pytest.mark.parametrize("requested", ["auto", None])
def test_an_open_choice_of_device_is_settled_in_the_config(requested):
    config = SimpleNamespace(trainer=SimpleNamespace(device=requested))
    with temp_env_var("VERL_FORCE_DEVICE", "cpu"):
        auto_set_device(config)
    assert config.trainer.device == "cpu"


def test_a_written_device_stays():
    config = SimpleNamespace(trainer=SimpleNamespace(device="cpu"))
    auto_set_device(config)
    assert config.trainer.device == "cpu"


def test_cuda_means_npu_where_only_npus_are(monkeypatch):
    monkeypatch.setattr(device, "is_npu_available", True)
    monkeypatch.setattr(device, "is_cuda_available", False)
    config = SimpleNamespace(trainer=SimpleNamespace(device="cuda"))
    auto_set_device(config)
    assert config.trainer.device == "npu"


@pytest.fixture
def _fresh_probe():
    device._probe_cpu_bf16.cache_clear()
    yield
    device._probe_cpu_bf16.cache_clear()


@pytest.mark.usefixtures("_fresh_probe")
def test_bfloat16_that_kills_a_process_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(
        device, "_BF16_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    )
    with pytest.raises(RuntimeError, match=r"signal 4.*ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"):
        check_cpu_bf16()


@pytest.mark.usefixtures("_fresh_probe")
def test_bfloat16_that_works_passes_and_is_tried_once(monkeypatch):
    check_cpu_bf16()  # the test environment sets what this machine needs
    monkeypatch.setattr(device, "_BF16_PROBE", "raise SystemExit(1)")
    check_cpu_bf16()


class TwoNpus:
    """What torch_npu offers as `torch.npu`, as far as it is used, on two devices of 64 GB."""

    def __init__(self):
        self.states = [torch.tensor([1]), torch.tensor([2])]
        self.calls = []

    def is_initialized(self):
        return True

    def current_device(self):
        return 1

    def device_count(self):
        return len(self.states)

    def mem_get_info(self, of):
        return 48 * 2**30, 64 * 2**30

    def max_memory_allocated(self):
        return 10

    def max_memory_reserved(self):
        return 16

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states):
        self.states = states

    def synchronize(self, of):
        self.calls.append(("synchronize", str(of)))

    def empty_cache(self):
        self.calls.append(("empty_cache", ""))


@pytest.fixture
def npus(monkeypatch):
    stand_in = TwoNpus()
    monkeypatch.setitem(device.STAND_INS, "npu", stand_in)
    with temp_env_var("VERL_FORCE_DEVICE", "npu"):
        yield stand_in


def test_another_kind_of_accelerator_answers_all_the_same_questions(npus):
    assert get_torch_device() is npus
    assert get_device_id() == 1
    assert device.KINDS["npu"].ray_resource == "NPU"
    # torch itself knows the name of the device only with its package, which is not here
    first = SimpleNamespace(type="npu", index=0)
    assert memory_info(first) == (48 * 2**30, 64 * 2**30)
    assert peak_memory() == (10, 16)
    assert get_device_capability() == (None, None)
    free_cached_memory()
    assert npus.calls == [("empty_cache", "")]


def test_its_random_numbers_continue_after_a_resume(npus):
    state = capture_rng()
    assert [int(number) for number in state["npu"]] == [1, 2]
    npus.states = [torch.tensor([7]), torch.tensor([8])]
    restore_rng(state)
    assert [int(number) for number in npus.states] == [1, 2]
    with pytest.raises(ValueError, match="of 3 NPU devices was saved and 2 are visible"):
        set_rng_states("npu", [torch.tensor([0])] * 3)


FOR_ONE_KIND_ONLY = (
    "models/kernels/",
    "utils/device.py",
    "utils/steady_memory.py",  # the CUDA driver's memory calls
    "utils/profiler/profile.py",  # NVTX, Nsight, the history of CUDA allocations
    "workers/engine/megatron/cpu.py",  # what stands in for CUDA where megatron-core expects it
    "workers/rollout/native/kernel_batch.py",  # decoding through kernels and CUDA graphs
    "workers/rollout/native/graphs.py",
    "workers/rollout/native/kernel_steps.py",
    "workers/weight_sync/cuda_ipc.py",
)


def test_nothing_else_names_a_kind_of_device_in_torch():
    root = Path(verl.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if place.startswith(FOR_ONE_KIND_ONLY):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_kind = isinstance(node, ast.Attribute) and node.attr in ("cuda", "npu")
            if is_kind and ast.unparse(node) in ("torch.cuda", "torch.npu"):
                found.append(f"{place}:{node.lineno}")
    assert not found, "ask verl.utils.device instead"


@pytest.fixture
def _deterministic_until_the_end(monkeypatch):
    """It concerns all of a process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.usefixtures("_deterministic_until_the_end")
def test_an_engine_with_full_determinism_trains_with_deterministic_kernels(tmp_path):
    assert not torch.are_deterministic_algorithms_enabled()
    engine = EngineRegistry.new(
        EngineSpec(
            model=HFModelConfig(path=str(save_tiny_model(tmp_path))),
            engine=FSDPEngineConfig(full_determinism=True),
            optimizer=FSDPOptimizerConfig(lr=0.01),
            device="cpu",
        )
    )
    engine.train_batch(batch(4), weighted_sum, micro_batching=[[0, 1], [2, 3]])
    assert torch.are_deterministic_algorithms_enabled()


class Node:
    """Refers to itself, so only the collector can free it."""

    def __init__(self):
        self.itself = self


def collections_during(work):
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return found


def visits_of_an_engine():
    """Each has some objects per row at the same time."""
    for _ in range(100):
        [[row] for row in range(NEW_OBJECTS // 2)]


def test_visits_of_an_engine_set_no_collection_off():
    assert len(collections_during(visits_of_an_engine)) > 100
    with collecting_seldom():
        assert collections_during(visits_of_an_engine) == []


def test_garbage_is_still_collected():
    with collecting_seldom():
        node = weakref.ref(Node())
        assert node() is not None
        kept = [[number] for number in range(2 * NEW_OBJECTS)]
        assert node() is None
        assert kept


def failing_run():
    with collecting_seldom():
        assert gc.get_threshold()[0] == NEW_OBJECTS
        raise RuntimeError("of a step")


def test_the_collector_is_afterwards_as_it_was():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="of a step"):
        failing_run()
    assert gc.get_threshold() == before


def test_whoever_wants_fewer_collections_still_gets_them():
    before = gc.get_threshold()
    try:
        gc.set_threshold(3 * NEW_OBJECTS, 5, 7)
        collect_seldom()
        assert gc.get_threshold() == (3 * NEW_OBJECTS, 5, 7)
        gc.set_threshold(700, 5, 7)
        collect_seldom()
        assert gc.get_threshold() == (NEW_OBJECTS, 5, 7)
    finally:
        gc.set_threshold(*before)
