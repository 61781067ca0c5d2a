"""A run ends with all that it has started, in a process that goes on: a notebook, a test, a
program with several runs."""

import gc
import os
import threading
import time
import weakref

import psutil
import pytest

from tests.children import children
from tests.toy import ROLLOUT, toy_run
from tests.utils.sockets import descriptors, listening_sockets
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.environment import all_variables

SECONDS = 240
BAD_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return "no score"
"""
ENGINE_BESIDE = (f"{ROLLOUT}.name=native_process", "trainer.board=true")
EVERYTHING_APART = (
    *("trainer.n_gpus_per_node=2", "trainer.controller=local"),
    f"{ROLLOUT}.name=native_process",
    "reward_model.reward_manager=prime",
    f"{ROLLOUT}.prometheus.enable=true",
)
FAILURES = {
    "a reward function without scores": "RewardError",
    "a step": "ArithmeticError",
    "Ctrl-C": "KeyboardInterrupt",
    "the start": "ValueError",
}


class FailsInAStep(PPOTrainer):
    def update(self, batch, step):
        raise ArithmeticError("the step fails")


class IsInterrupted(PPOTrainer):
    """While responses are generated."""

    def _submit(self, groups, step):
        super()._submit(groups, step)
        raise KeyboardInterrupt


class FailsAtItsStart(PPOTrainer):
    """When its workers run."""

    def _agent_loop_manager(self):
        raise ValueError("the start fails")


TRAINERS = {
    "a step": FailsInAStep,
    "Ctrl-C": IsInterrupted,
    "the start": FailsAtItsStart,
}


def what_is_there():
    """What could outlive a run, by kind."""
    me = psutil.Process()
    links = descriptors(me.pid)
    return {
        "processes": sorted(child.pid for child in me.children(recursive=True)),
        "ports": sorted(listening_sockets(me.pid)),
        "shared memory": sorted(n for n in os.listdir("/dev/shm") if not n.startswith("sem.")),
        "variables": {n for n in all_variables() if n in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
        "sockets": sum(link.startswith("socket:") for link in links),
        "pipes": sum(link.startswith("pipe:") for link in links),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def settled(expected):
    """What differs, after a moment for what has been told to end; None if nothing does."""
    deadline = time.monotonic() + 10
    while True:
        there = what_is_there()
        found = {name: there[name] for name, value in expected.items() if there[name] != value}
        if not found or time.monotonic() > deadline:
            return found or None
        time.sleep(0.1)


STEADY = ("processes", "ports", "shared memory", "variables")
"""The same after each run as before it. Threads of this process's event loops start once, and
descriptors go with the last reference to a run."""


def runs_in_one_process(toy, folder, changes, kinds, line):
    """The child of a test: one run after the other; what each leaves is compared."""
    (folder / "bad.py").write_text(BAD_REWARD)
    before, first, trainers, kept = what_is_there(), None, [], []
    for number, kind in enumerate(kinds):
        options = [*changes]
        if kind == "a reward function without scores":
            options.append(f"custom_reward_function.path={folder / 'bad.py'}")
        error = None
        try:
            _, trainer = toy_run(
                toy, folder / str(number), *options, trainer_class=TRAINERS.get(kind, PPOTrainer)
            )
            trainers.append(weakref.ref(trainer))
            del trainer
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
            kept.append(raised)  # as a notebook does, with all the frames of its traceback
        if (None if error is None else type(error).__name__) != FAILURES.get(kind):
            line.send(f"{kind} ended with {error!r}")
            return
        expected = {name: before[name] for name in STEADY}
        expected |= {} if first is None else {"threads": first["threads"]}
        found = settled(expected)
        if found is not None:
            line.send(f"after {kind or 'success'}: {found}")
            return
        first = first or what_is_there()
    kept.clear()
    error = None
    gc.collect()
    alive = [trainer for trainer in trainers if trainer() is not None]
    if alive:
        line.send(f"{len(alive)} trainers are still in memory")
        return
    last = what_is_there()
    grown = {name: last[name] for name in ("sockets", "pipes") if last[name] > first[name]}
    line.send(f"more descriptors than after the first run: {grown}" if grown else "")


def test_the_checker_sees_a_process_that_is_left(tmp_path):
    """Of itself: that it would see what it looks for."""
    before = what_is_there()
    process = psutil.Popen(["sleep", "60"])
    try:
        assert what_is_there()["processes"] != before["processes"]
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        pytest.param(ENGINE_BESIDE, ("a step", None), id="an engine beside"),
        pytest.param(
            *(ENGINE_BESIDE, (*FAILURES, None, "a step", None)),
            id="an engine beside, every end",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(EVERYTHING_APART, ("a step", None, "Ctrl-C")),
            id="ranks and graders",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_leaves_nothing_behind_however_it_ends(toy, tmp_path, changes, kinds):
    ours, theirs = children.Pipe()
    child = children.Process(
        target=runs_in_one_process, args=(toy, tmp_path, changes, kinds, theirs)
    )
    child.start()
    theirs.close()
    try:
        assert ours.poll(SECONDS * 2), "the runs did not end"
        assert ours.recv() == ""
    finally:
        child.kill()
        child.join(timeout=10)
