import asyncio
import json
import logging
import time

import pytest
import torch

from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.utils.device import is_cuda_available, is_npu_available
from verl.utils.profiler import (
    DistProfiler,
    DistProfilerExtension,
    GPUMemoryLogger,
    ProfilerConfig,
    log_gpu_memory_usage,
    marked_timer,
    simple_timer,
)
from verl.utils.profiler.config import NsightToolConfig, TorchProfilerToolConfig


class Worker(DistProfilerExtension):
    @DistProfiler.annotate(color="red", role="actor_update")
    def update(self, x):
        return (x @ x).sum().item()

    @DistProfiler.annotate(role="generate")
    async def generate(self, x):
        await asyncio.sleep(0)
        return self.update(x)


def worker(tmp_path, *, rank=0, discrete=False, contents=(), **options) -> Worker:
    config = ProfilerConfig(
        **{"tool": "torch", "enable": True, "ranks": [0], "save_path": str(tmp_path)} | options
    )
    tool_config = TorchProfilerToolConfig(discrete=discrete, contents=list(contents))
    return Worker(DistProfiler(rank, config, tool_config))


def event_names(path) -> set[str]:
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


# ---- timers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timer", [simple_timer, marked_timer])
def test_a_timer_adds_up_and_keeps_the_time_of_a_block_that_raised(timer):
    timing = {}
    with timer("gen", timing):
        time.sleep(0.01)
    first = timing["gen"]
    with pytest.raises(KeyError), timer("gen", timing):
        raise KeyError("x")
    assert first >= 0.01
    assert timing["gen"] > first


def test_a_marked_timer_takes_the_colour_that_scripts_pass():
    timing = {}
    with marked_timer("step", timing, color="red"):
        pass
    assert list(timing) == ["step"]


# ---- torch ---------------------------------------------------------------------------------------


def test_a_step_is_written_as_a_trace_that_shows_operations_and_marks(tmp_path):
    subject = worker(tmp_path)
    subject.start_profile(role="e2e", profile_step=3)
    with marked_timer("stage_gen", {}):
        subject.update(torch.ones(8, 8))
    subject.stop_profile()
    names = event_names(tmp_path / "e2e_step3_rank0.json")
    assert {"aten::mm", "stage_gen", "actor_update"} <= names


def test_discrete_mode_writes_one_trace_per_annotated_method(tmp_path):
    subject = worker(tmp_path, discrete=True)
    subject.update(torch.ones(8, 8))  # before the step: not recorded
    subject.start_profile(role="e2e", profile_step=1)
    subject.update(torch.ones(8, 8))
    subject.update(torch.ones(8, 8))
    subject.stop_profile()
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [
        "actor_update_step1_rank0.json",
        "actor_update_step1_rank0_1.json",
    ]


def test_an_async_method_is_recorded_to_its_end_and_what_it_calls_is_inside(tmp_path):
    subject = worker(tmp_path, discrete=True)
    subject.start_profile()
    asyncio.run(subject.generate(torch.ones(8, 8)))
    subject.stop_profile()
    (trace,) = tmp_path.iterdir()
    assert trace.name == "generate_rank0.json"
    assert {"aten::mm", "actor_update", "generate"} <= event_names(trace)


def test_a_method_that_raises_still_leaves_its_trace(tmp_path):
    subject = worker(tmp_path, discrete=True)
    subject.start_profile()
    with pytest.raises(RuntimeError):
        subject.update(torch.ones(2, 3))
    subject.stop_profile()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("options", [{"rank": 1}, {"enable": False}, {"tool": None}])
def test_a_rank_that_takes_no_part_records_nothing(tmp_path, options):
    subject = worker(tmp_path, **options)
    subject.start_profile(profile_step=1)
    assert not subject.profiler.check_this_step()
    assert subject.update(torch.ones(2, 2)) == 8.0
    subject.stop_profile()
    assert list(tmp_path.iterdir()) == []


def test_without_ranks_the_first_one_is_profiled(tmp_path):
    assert worker(tmp_path, rank=0, ranks=[]).profiler.check_this_rank()
    assert not worker(tmp_path, rank=1, ranks=[]).profiler.check_this_rank()


def test_all_ranks_means_every_rank(tmp_path):
    profiler = worker(tmp_path, rank=5, all_ranks=True, ranks=[]).profiler
    assert profiler.check_enable()
    assert profiler.check_this_rank()
    assert not profiler.is_discrete_mode()


def test_starting_twice_is_an_error_and_stopping_twice_is_not(tmp_path):
    subject = worker(tmp_path)
    subject.start_profile()
    with pytest.raises(ValueError, match="already started"):
        subject.start_profile()
    subject.stop_profile()
    subject.stop_profile()


def test_unknown_contents_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"contents has \['gpu'\]; choose from: cuda, cpu"):
        worker(tmp_path, contents=["gpu"])
    with pytest.raises(ValueError, match="save_path is not set"):
        worker(tmp_path, save_path=None)


def test_the_tool_options_of_the_role_count_when_none_are_passed(tmp_path):
    config = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(tmp_path))
    assert not DistProfiler(0, config).is_discrete_mode()


# ---- other tools ---------------------------------------------------------------------------------


@pytest.mark.skipif(is_cuda_available, reason="there is a CUDA device")
@pytest.mark.parametrize("tool", ["nsys", "torch_memory"])
def test_tools_for_cuda_say_that_there_is_none(tmp_path, tool):
    config = ProfilerConfig(tool=tool, enable=True, all_ranks=True, save_path=str(tmp_path))
    with pytest.raises(ValueError, match=f"profiler.tool={tool} needs a CUDA device"):
        DistProfiler(0, config).start()
    with pytest.raises(ValueError, match="dump_memory_snapshot needs a CUDA device"):
        DistProfilerExtension(DistProfiler(0, ProfilerConfig())).dump_memory_snapshot("now")
    elsewhere = ProfilerConfig(tool=tool, enable=True, ranks=[1], save_path=str(tmp_path))
    DistProfiler(0, elsewhere, NsightToolConfig())  # this rank takes no part


@pytest.mark.skipif(is_npu_available, reason="there is an Ascend device")
def test_the_ascend_tool_says_what_is_missing(tmp_path):
    config = ProfilerConfig(tool="npu", enable=True, all_ranks=True, save_path=str(tmp_path))
    with pytest.raises(ValueError, match="needs the package torch_npu and an Ascend device"):
        DistProfiler(0, config)


@pytest.mark.gpu
def test_memory_history_is_written_as_a_snapshot(tmp_path):
    config = ProfilerConfig(
        tool="torch_memory", enable=True, all_ranks=True, save_path=str(tmp_path)
    )
    profiler = DistProfiler(0, config)
    profiler.start(role="e2e", profile_step=1)
    torch.ones(1024, device="cuda")
    profiler.stop()
    assert (tmp_path / "e2e_step1_rank0.pickle").stat().st_size > 0
    now = DistProfilerExtension(profiler).dump_memory_snapshot("now", sub_dir="b")
    assert now == str(tmp_path / "b" / "now_rank0.pickle")
    assert (tmp_path / "b" / "now_rank0.pickle").stat().st_size > 0


@pytest.mark.gpu
def test_device_memory_is_logged_before_and_after(caplog):
    logger = logging.getLogger("memory_test")

    class Plain:
        @GPUMemoryLogger(role="actor", logger=logger, level=logging.ERROR)
        def double(self, x):
            with marked_timer("stage", {}):
                return 2 * x

    Plain().double(torch.ones(4, device="cuda"))
    before, after = (record.getMessage() for record in caplog.records)
    assert before.startswith("actor: before ")
    assert after.startswith("actor: after ")
    assert "memory allocated (GB): " in after


# ---- workers -------------------------------------------------------------------------------------


def test_the_controller_may_call_start_and_stop_on_all_ranks():
    for method in (DistProfilerExtension.start_profile, DistProfilerExtension.stop_profile):
        assert getattr(method, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL


def test_an_annotated_method_of_an_object_without_a_profiler_just_runs():
    class Plain:
        @DistProfiler.annotate(role="x")
        def double(self, x):
            return 2 * x

    assert Plain().double(3) == 6


@pytest.mark.skipif(is_cuda_available, reason="there is device memory to log")
def test_without_an_accelerator_there_is_no_memory_to_log(caplog):
    logger = logging.getLogger("memory_test")

    class Plain:
        @GPUMemoryLogger(role="actor", logger=logger, level=logging.ERROR)
        def double(self, x):
            return 2 * x

        @GPUMemoryLogger(role="actor", logger=logger, level=logging.ERROR)
        async def triple(self, x):
            return 3 * x

    assert Plain().double(3) == 6
    assert asyncio.run(Plain().triple(3)) == 9
    log_gpu_memory_usage("head", logger=logger, level=logging.ERROR)
    assert caplog.records == []
