"""A machine that gives out: a run without descriptors, memory or room ends and says why.

The commands run in processes of their own, because limits cannot be raised again.
"""

import ast
import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.chaos.shim import Control, environment, require_shim
from tests.chaos.strikes import wait_until_gone
from tests.toy import ACTOR, ROLLOUT, toy_overrides, toy_run
from tests.trainer.test_ranks import comparable
from tests.utils.checkpoint.test_store import run_killed
from verl.config.command import load_and_run
from verl.config.ppo import PPOConfig
from verl.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerError
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.checkpoint.layout import holding
from verl.utils.environment import memory_hint
from verl.workers.reward_manager.grader import InfraError
from verl.workers.reward_manager.workers import WorkerPool

REPOSITORY = Path(__file__).parents[2]
WALL_CLOCK = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today"}
DATES = {
    "board/recorder.py",  # when a step ended
    "board/store.py",  # when a run began
    "server/service.py",  # `created` of a response
    "utils/checkpoint/checkpoint_manager.py",  # when a rented instance ends
    "utils/trace_backends.py",  # when a span began
    "utils/template_probe.py",  # the date that chat templates may print
}


def test_no_deadline_is_kept_by_the_wall_clock():
    """Whoever waits asks the clock that does not step; the other one only tells the date."""
    package = REPOSITORY / "verl"
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        is_possible = any(name in text for name in WALL_CLOCK)
        for node in ast.walk(ast.parse(text)) if is_possible else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(tuple(WALL_CLOCK)):
                found.add(str(path.relative_to(package)))
    assert found <= DATES


def command(toy, output, *changes, prefix=(), **options):
    """Exit code and output of the training command."""
    output.mkdir(exist_ok=True)
    ended = subprocess.run(
        [
            *prefix,
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *toy_overrides(toy, output),
            *changes,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(output / "metrics.jsonl")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        **options,
    )
    return ended.returncode, ended.stdout


def limited(kind, value):
    return {"preexec_fn": lambda: resource.setrlimit(kind, (value, value))}


MANY_PROCESSES = (
    "trainer.n_gpus_per_node=2",
    "trainer.controller=local",
    f"{ROLLOUT}.name=native_process",
    f"{ACTOR}.fsdp_config.sharding=full",
    "reward_model.reward_manager=prime",
)
SMALL_SHARED_MEMORY = (
    "unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"',
)  # fmt: skip


def can_mount():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL_SHARED_MEMORY, "true"], capture_output=True).returncode == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "lacks",
    [
        pytest.param("memory", marks=pytest.mark.slow),
        pytest.param("descriptors", marks=pytest.mark.slow),
        pytest.param("room in /dev/shm", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_resources_ends_with_an_exit_code_and_the_cause(own_toy, tmp_path, lacks):
    if lacks == "memory":
        options = limited(resource.RLIMIT_AS, 800_000_000)
        code, said = command(own_toy, tmp_path / "run", **options)
        causes = ("MemoryError: this process may map",)
    elif lacks == "descriptors":
        options = limited(resource.RLIMIT_NOFILE, 14)
        code, said = command(own_toy, tmp_path / "run", *MANY_PROCESSES, **options)
        causes = ("Too many open files",)
    elif not can_mount():
        pytest.skip("a small /dev/shm needs unshare and user namespaces")
    else:
        changes = MANY_PROCESSES[:-1]
        code, said = command(own_toy, tmp_path / "run", *changes, prefix=SMALL_SHARED_MEMORY)
        headline = next(line for line in said.splitlines() if "raised: " in line)
        assert "/dev/shm has no room" in headline, "and not what another process made of it"
        causes = ("--shm-size",)
    assert code not in (0, None)
    assert any(cause in said for cause in causes), said[-2000:]


@pytest.mark.parametrize("megabytes", [120, 200, 1200])
def test_a_command_that_may_map_too_little_says_so_before_it_loads_anything(megabytes):
    """Without memory numpy waits for ever at 200 MB, and others crash."""
    ended = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "trainer.dry_run=True"],
        capture_output=True,
        text=True,
        timeout=100,
        **limited(resource.RLIMIT_AS, megabytes << 20),
    )
    assert ended.returncode == 1
    assert f"MemoryError: this process may map {megabytes} MiB" in ended.stderr
    assert "ulimit -v" in ended.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 80 bytes"),
    ],
    ids=repr,
)
def test_an_error_that_comes_from_a_lack_of_memory_is_named(capsys, error):
    def task(loaded):
        raise ValueError("what became of it") from error

    config = OmegaConf.create({})
    with pytest.raises(ValueError, match="what became of it"):
        load_and_run(config, PPOConfig, task)
    said = capsys.readouterr().err
    assert "error: this process got no more memory" in said
    assert type(error).__name__ in said


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert memory_hint(ValueError("a setting")) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sixty_four_descriptors_are_enough_for_a_run_of_many_processes(own_toy, tmp_path):
    options = limited(resource.RLIMIT_NOFILE, 64)
    code, said = command(own_toy, tmp_path / "run", *MANY_PROCESSES, **options)
    assert code == 0, said[-2000:]


@contextmanager
def little_memory(num_bytes):
    """A file to write a process id to: with more memory than this the kernel kills that process."""
    old = Path("/sys/fs/cgroup/memory")
    root = old if old.is_dir() else Path("/sys/fs/cgroup")
    limits = {"memory.limit_in_bytes": num_bytes} if old.is_dir() else {"memory.max": num_bytes}
    optional = {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": num_bytes}
    group = root / f"verl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    try:
        for name, value in (limits | optional).items():
            if (group / name).exists():
                (group / name).write_text(str(value))
        if not (group / next(iter(limits))).exists():
            pytest.skip("control groups do not limit memory here")
        yield group / "cgroup.procs"
    finally:
        wait_until_gone([int(pid) for pid in (group / "cgroup.procs").read_text().split()])
        group.rmdir()


def eat_memory(group):
    """Go into the group and take more than it has."""
    Path(group).write_text(str(os.getpid()))
    pages = [bytearray(b"x") * (8 << 20) for _ in range(200)]
    return float(len(pages))


class Hungry(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def eat(self, group):
        return eat_memory(group)


OUT_OF_MEMORY = r"SIGKILL.*the kernel does.* when memory runs out"


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_its_memory_is_named():
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Hungry), in_process=False)
    with little_memory(400 << 20) as procs, pytest.raises(WorkerError, match=OUT_OF_MEMORY):
        group.eat(str(procs))
    group.shutdown()


def test_a_reward_function_that_the_kernel_kills_for_its_memory_is_no_score():
    with little_memory(400 << 20) as procs:
        pool = WorkerPool(lambda value: eat_memory(procs), timeout_seconds=60.0)
        grade = pool.call({"value": 0.5})
        pool.close()
    assert isinstance(grade, InfraError)
    assert "the kernel killed processes when memory ran out" in grade.reason


def test_a_command_that_the_kernel_kills_for_its_memory_is_named_at_the_next_start(
    tmp_path, caplog
):
    with little_memory(400 << 20) as procs:
        process, locks = run_killed(tmp_path, str(procs))
    with holding(locks):
        (said,) = [record.getMessage() for record in caplog.records]
    assert f"process {process} on" in said
    assert re.search("the kernel has killed [0-9]+ processes .* because memory ran out", said)


TOY = """
import json, sys
from pathlib import Path
from tests.toy import toy_run

metrics, _ = toy_run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
print(json.dumps(metrics))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_clock_that_steps_changes_nothing(own_toy, tmp_path):
    """An hour to and fro, fifty times a second, in all processes of the run."""
    library, control = require_shim(tmp_path), Control(tmp_path / "control")
    expected, _ = toy_run(own_toy, tmp_path / "straight")
    output, is_over = tmp_path / "run", threading.Event()
    output.mkdir()

    def step():
        number = 0
        while not is_over.wait(0.02):
            number += 1
            control.set(clock_seconds=3600.0 * (number % 3 - 1))

    stepping = threading.Thread(target=step)
    stepping.start()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", TOY, str(own_toy), str(output), MANY_PROCESSES[-1]],
            env={**os.environ, **environment(library, tmp_path, control=control)},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        is_over.set()
        stepping.join(timeout=10)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert comparable(found) == comparable(expected)
