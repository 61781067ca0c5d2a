"""What only local groups have: objects by reference, packing, interruption, child processes."""

import functools
import inspect
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

from tests.single_controller.workers import Actor, Calculator, Counted, Forks
from verl import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerTimeout
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.failures import WorkerDied
from verl.single_controller.controllers import controllers
from verl.single_controller.local import (
    LocalWorkerGroup,
    create_colocated_worker_cls,
    fork_server,
)
from verl.single_controller.local.in_process import RankEnvironment
from verl.single_controller.local.payload import Payload
from verl.utils.processes import descendants


@pytest.fixture
def alone():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Calculator))
    yield group
    group.shutdown()


# ---- in this process -----------------------------------------------------------------------------


class Mutating(Worker):
    """Does to its batch what workers do."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def mutate(self, batch):
        self.seen = batch.batch["x"]
        batch.meta_info["temperature"] = 1.0
        batch.batch["extra"] = batch.batch["x"] + 1
        batch.pop(batch_keys=["x"])
        batch.non_tensor_batch["note"] = np.array(["a"] * len(batch), dtype=object)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep(self, thing):
        return thing


def test_in_this_process_objects_pass_by_reference():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Mutating))
    thing = object()
    assert group.keep(thing) == [thing]
    batch = DataProto.from_dict({"x": torch.arange(3)})
    result = group.mutate(batch)
    worker = group.workers[0]
    assert worker.seen.data_ptr() == batch.batch["x"].data_ptr()
    assert result.batch["extra"].tolist() == [1, 2, 3]
    group.shutdown()


def test_what_a_worker_does_to_its_batch_stays_its_own():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Mutating))
    batch = DataProto.from_dict({"x": torch.arange(3)})
    group.mutate(batch)
    assert list(batch.batch.keys()) == ["x"]
    assert batch.meta_info == {}
    assert batch.non_tensor_batch == {}
    group.shutdown()


def test_the_environment_is_given_back_when_the_last_group_ends(monkeypatch):
    monkeypatch.setattr(RankEnvironment, "_holders", 0)  # whatever other tests still hold
    monkeypatch.setattr(RankEnvironment, "_before", {})
    monkeypatch.setenv("RANK", "9")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first = LocalWorkerGroup(None, ClassWithInitArgs(Actor))
    second = LocalWorkerGroup(None, ClassWithInitArgs(Actor))
    first.shutdown()
    first.shutdown()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    second.shutdown()
    assert os.environ["RANK"] == "9"
    assert "WORLD_SIZE" not in os.environ


def test_a_call_from_another_thread_is_bounded_too(alone):
    caught = []

    def call():
        with pytest.raises(WorkerTimeout, match="in sleep_on") as error:
            alone.with_deadline(0.1).sleep_on({0}, 0.3)
        caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=60)
    assert len(caught) == 1


def test_an_interrupted_call_leaves_no_trace(alone):
    with pytest.raises(WorkerTimeout):
        alone.with_deadline(0.05).sleep_on({0}, 5)
    time.sleep(0.1)
    assert alone.add(1) == [1]


class Draws(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self):
        return float(torch.rand(())), float(np.random.rand()), random.random()


class Runner(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run(self, function):
        return function()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=("x",))
    def callers(self, batch):
        names = [frame.function for frame in inspect.stack(0)]
        return DataProto(non_tensor_batch={"name": np.array(names, dtype=object)})


@pytest.fixture
def runner():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Runner))
    yield group
    group.shutdown()


@pytest.mark.parametrize("colocate", [create_colocated_worker_cls, None])
def test_two_frames_lie_between_a_caller_and_the_method_of_a_single_rank(colocate):
    specs = {"role": ClassWithInitArgs(Runner)}
    group = LocalWorkerGroup(None, colocate(specs) if colocate else specs["role"])
    called = group.spawn(specs)["role"] if colocate else group
    names = called.callers(DataProto.from_dict({"x": torch.zeros(1)})).non_tensor_batch["name"]
    here = "test_two_frames_lie_between_a_caller_and_the_method_of_a_single_rank"
    assert list(names[:4]) == ["callers", "run_here", "call", here]
    group.shutdown()


def test_a_method_that_is_decorated_again_or_replaced_is_called_as_it_is(runner, monkeypatch):
    registered = Runner.run

    @functools.wraps(registered)
    def decorated(self, function):
        return "decorated", registered(self, function)

    monkeypatch.setattr(Runner, "run", decorated)
    assert runner.run(lambda: 1) == [("decorated", 1)]
    monkeypatch.setattr(runner.workers[0], "run", lambda function: "replaced", raising=False)
    assert runner.run(lambda: 1) == ["replaced"]


def test_nested_deadlines_each_end_their_own_function(runner):
    start = time.monotonic()

    def inner():
        with pytest.raises(WorkerTimeout):
            runner.with_deadline(0.1).run(lambda: time.sleep(60))
        return "inner was cut, outer was not"

    assert runner.with_deadline(50).run(inner) == ["inner was cut, outer was not"]
    with pytest.raises(WorkerTimeout, match="in test_nested"):
        runner.with_deadline(0.1).run(lambda: runner.with_deadline(50).run(lambda: time.sleep(60)))
    assert time.monotonic() - start < 50


def test_a_handler_for_everything_does_not_swallow_the_deadline(runner):
    swallowed = []

    def stubborn():
        try:
            time.sleep(5)
        except Exception as error:
            swallowed.append(error)

    with pytest.raises(WorkerTimeout):
        runner.with_deadline(0.1).run(stubborn)
    assert swallowed == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cls_with_init": None}, "needs cls_with_init"),
        ({"resource_pool": ResourcePool()}, "pool is empty"),
        ({"resource_pool": ResourcePool([2]), "in_process": True}, "2 ranks cannot all be this"),
        ({"worker_env": {"RANK": "1"}}, r"worker_env sets \['RANK'\]"),
    ],
)
def test_a_group_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LocalWorkerGroup(**{"cls_with_init": ClassWithInitArgs(Actor), **options})


def test_the_name_that_code_for_ray_uses_works_too():
    group = LocalWorkerGroup(
        resource_pool=ResourcePool([1]), ray_cls_with_init=ClassWithInitArgs(Actor, "me")
    )
    assert group.who() == ["me 0"]
    group.shutdown()


def test_controllers_are_found_by_name():
    assert controllers["local"].worker_group is LocalWorkerGroup
    assert list(controllers) == ["local", "ray"]
    with pytest.raises(ValueError, match="unknown controller 'slurm'"):
        controllers["slurm"]


# ---- payloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.arange(6).view(2, 3).T,
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([[0, 1], [2, 0]]).to_sparse(),
    ],
    ids=str,
)
def test_tensors_travel_by_value(tensor):
    copy = Payload.of(tensor, "a tensor").unpickle()
    assert type(copy) is type(tensor)
    assert (copy.dtype, copy.shape, copy.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert tensor.is_sparse or not tensor.is_shared()


def test_an_opened_tensor_can_be_written_to_and_is_nobodys_but_ours():
    tensor = torch.zeros(2)
    payload = Payload.of(tensor, "a tensor")
    first, second = payload.unpickle(), payload.unpickle()
    first += 1
    assert (tensor.sum(), first.sum(), second.sum()) == (0, 2, 0)


def test_a_batch_survives_packing():
    batch = DataProto.from_dict(
        {"x": torch.arange(2)}, {"label": ["a", "b"]}, {"metrics": {"n": [1]}}
    )
    copy = Payload.of(batch, "a batch").unpickle()
    assert copy.batch["x"].tolist() == [0, 1]
    assert copy.non_tensor_batch["label"].tolist() == ["a", "b"]
    assert copy.meta_info == {"metrics": {"n": [1]}}


def test_what_cannot_be_packed_is_named_with_the_rule():
    with pytest.raises(ValueError, match=r"an argument of f cannot be sent .* top level"):
        Payload.of(lambda: None, "an argument of f")


def test_a_class_that_processes_cannot_import_is_refused_before_any_starts():
    class Inner(Worker):
        pass

    before = descendants(os.getpid())
    with pytest.raises(ValueError, match=r"worker class .*Inner cannot be sent"):
        LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Inner))
    assert set(descendants(os.getpid())) <= set(before)


# ---- child processes -----------------------------------------------------------------------------


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=60):
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def run_driver(script):
    program = "import gc; gc.disable()\n" + textwrap.dedent(script)  # most of it is imports
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    words = driver.stdout.readline().split()
    assert words[:1] == ["pids"], driver.stdout.read()
    return driver, [int(word) for word in words[1:]]


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_fork_of_a_rank_does_not_answer(how):
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Forks), in_process=False)
    assert [group.answer(number, how) for number in range(4)] == [[0], [1], [2], [3]]
    group.shutdown()


def test_a_rank_that_says_what_nobody_asked_for_is_lost():
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Forks), in_process=False)
    with pytest.raises(WorkerDied, match="broke the line to it: a reply came to call 1, for which"):
        group.speak(1, b"hello")
    group.shutdown()


def test_no_process_outlives_a_killed_driver():
    driver, pids = run_driver("""
        import threading, time
        from tests.single_controller.workers import Calculator
        from verl.single_controller import ClassWithInitArgs, ResourcePool
        from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls

        groups = {}
        def start(name):
            spec = ClassWithInitArgs(Calculator)
            groups[name] = LocalWorkerGroup(ResourcePool([1]), spec, in_process=False)

        thread = threading.Thread(target=start, args=("thread",))
        thread.start()
        start("main thread")
        thread.join()
        time.sleep(0.2)  # a worker must outlive the thread that started it
        pids = [groups[name].where()[0] for name in ("main thread", "thread")]
        held = groups["main thread"].execute_all_async("hold_the_interpreter", 600)
        busy = groups["thread"].execute_all_async("sleep_on", {0}, 600)
        time.sleep(0.2)
        print("pids", *pids, flush=True)
        time.sleep(600)
    """)
    with driver:
        assert len(pids) == 2
        driver.send_signal(signal.SIGKILL)
        driver.wait(timeout=60)
    wait_until_gone(pids)


def test_a_driver_that_just_ends_takes_its_workers_along():
    driver, pids = run_driver("""
        from tests.single_controller.workers import Calculator
        from verl.single_controller import ClassWithInitArgs, ResourcePool
        from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls

        spec = ClassWithInitArgs(Calculator)
        group = LocalWorkerGroup(ResourcePool([1]), spec, in_process=False)
        print("pids", *group.where(), flush=True)
        raise SystemExit(3)
    """)
    with driver:
        assert driver.wait(timeout=60) == 3
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
            from tests.single_controller.workers import Actor
            from verl.single_controller import ClassWithInitArgs, ResourcePool
            from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls

            LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor), in_process=False)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "WorkerDied" in done.stderr
    assert "if __name__" in done.stderr.splitlines()[-1]


def test_running_out_of_file_descriptors_is_an_error_not_a_hang():
    script = """
        import os, resource
        from tests.single_controller.workers import Calculator
        from verl.single_controller import ClassWithInitArgs, ResourcePool
        from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls

        in_use = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, in_use + 1))
        try:
            LocalWorkerGroup(ResourcePool([8]), ClassWithInitArgs(Calculator))
        except OSError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert "Too many open files" in done.stdout, done.stderr


def test_a_rank_that_exits_tells_its_code_and_large_batches_pass():
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Calculator), in_process=False)
    batch = DataProto.from_dict({"x": torch.arange(2_000_000)})
    assert torch.equal(group.double(batch).batch["x"], batch.batch["x"] * 2)
    with pytest.raises(
        RuntimeError, match="the result of return_what_cannot_travel cannot be sent"
    ):
        group.return_what_cannot_travel()
    with pytest.raises(ValueError, match="an argument of add, a function, cannot be sent"):
        group.add(lambda: None)
    assert group.workers[0].process.pid == group.where()[0]
    with pytest.raises(RuntimeError, match="exited with code 3"):
        group.exit_with(3)
    group.shutdown()


def test_what_several_ranks_get_is_packed_once(calculators):
    if not isinstance(calculators, LocalWorkerGroup) or calculators.world_size == 1:
        pytest.skip("nothing is packed here by us")
    before = Counted.num_packed
    assert len(calculators.pass_through(Counted())) == calculators.world_size
    assert Counted.num_packed - before == 1


def test_a_stopped_rank_does_not_block_the_driver_that_sends_to_it(calculators):
    pids = calculators.where()
    if os.getpid() in pids:
        pytest.skip("the driver itself would stop")
    os.kill(pids[0], signal.SIGSTOP)
    start = time.monotonic()
    try:
        future = calculators.double_later(DataProto.from_dict({"x": torch.arange(4_000_000)}))
        assert time.monotonic() - start < 60
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert len(future.get(timeout_seconds=30)) == 4_000_000


def use_spawned_rank():
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Calculator), in_process=False)
    assert group.add(1) == [1]  # and nobody shuts it down


def test_a_child_of_multiprocessing_ends_although_its_ranks_wait_for_calls(monkeypatch):
    monkeypatch.setattr(fork_server, "is_available", lambda: False)  # as where there is a GPU
    child = multiprocessing.get_context("fork").Process(target=use_spawned_rank)
    child.start()
    child.join(120)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()


def test_what_a_rank_draws_follows_from_the_seed_and_its_number():
    def draws():
        group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Draws))
        group.seed_rank(5)
        drawn = group.draw()
        group.shutdown()
        return drawn

    first, again = draws(), draws()
    assert first == again
    assert not set(first[0]) & set(first[1])
