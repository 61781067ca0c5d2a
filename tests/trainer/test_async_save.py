"""Training goes on while a checkpoint is written, and nothing of it is lost."""

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.toy import ACTOR, toy_overrides, toy_run, weights
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.single_controller import ClassWithInitArgs, ResourcePool, Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.failures import WorkerDied, WorkerTimeout
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.ppo.checkpointing import RunCheckpoints, RunState
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.checkpoint.background import Receipt
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.layout import CheckpointSaveError
from verl.utils.checkpoint.store import intact_step_at

ASYNC = [
    f"{ACTOR}.checkpoint.async_save=true",
    "trainer.save_freq=2",
    "trainer.total_training_steps=4",
]


class StubbornDisk(FSDPCheckpointManager):
    """Writes when it may, and refuses when it is full."""

    def capture(self, keep):
        return [self.when_possible, *super().capture(keep)]

    def when_possible(self, folder):
        assert self.may_write.wait(60)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))


class OnStubbornDisk(PPOTrainer):
    """`disk` is the policy's; `during_step` looks at the run in the middle of each step."""

    def init_workers(self):
        super().init_workers()
        worker = self.actor_rollout_wg.workers[0]
        self.disk = StubbornDisk(
            worker.engine.module,
            worker.engine,
            processing_class=worker.tokenizer,
            checkpoint_config=worker.checkpoints.checkpoint_config,
        )
        self.disk.may_write, self.disk.is_full = threading.Event(), False
        worker.checkpoints = self.disk

    def annotate(self, batch, step):
        self.during_step()
        return super().annotate(batch, step)

    def during_step(self):
        raise NotImplementedError


def committed(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("COMMITTED step=") for line in lines if line.startswith("COMMITTED")]


def test_a_step_is_committed_as_it_was_while_the_next_ones_run(toy, tmp_path, capsys):
    class Run(OnStubbornDisk):
        def during_step(self):
            if self.global_steps == 4:  # the weights have changed since they were saved
                assert self.checkpoint_manager.committed_step is None
                assert not (tmp_path / "checkpoints" / "global_step_2").exists()
                self.disk.may_write.set()

    _, trainer = toy_run(toy, tmp_path, *ASYNC, trainer_class=Run)
    assert committed(capsys) == ["2", "4"]
    assert trainer.checkpoint_manager.committed_step == 4
    metrics, again = toy_run(
        toy,
        tmp_path,
        *ASYNC,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'checkpoints' / 'global_step_2'}",
    )
    assert [step["step"] for step in metrics] == [3, 4]
    assert all(map(torch.equal, weights(again).values(), weights(trainer).values()))


class NeverDone(Worker):
    """Begins to write in the background."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path, global_step=0):
        return str(Receipt(Path(path) / "receipt").path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.fixture
def saving(toy, tmp_path, request):
    """A run that saves on a rank which got a signal while it writes."""
    changes = OmegaConf.from_dotlist([*toy_overrides(toy, tmp_path), *ASYNC])
    checkpoints = RunCheckpoints(load_config(changes, PPOConfig).checked(), [], {})
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(NeverDone), in_process=False)
    checkpoints.roles["actor"] = group
    group._backend.probe_seconds = 0.5
    checkpoints.save(RunState(global_steps=2, dataloader={}))
    os.kill(group.pid()[0], request.param)
    yield checkpoints
    group.shutdown()
    assert not list(tmp_path.rglob("*global_step_2*")), "nothing of the step is left"


@pytest.mark.parametrize("saving", [signal.SIGKILL], indirect=True)
def test_a_rank_killed_while_it_writes_is_noticed_by_who_waits_for_the_save(saving):
    with pytest.raises(WorkerDied, match=r"save_checkpoint: rank 0 .*SIGKILL"):
        saving.finish(60)


@pytest.mark.parametrize("saving", [signal.SIGSTOP], indirect=True)
def test_a_rank_stopped_while_it_writes_is_noticed_too(saving):
    with pytest.raises(WorkerTimeout, match=r"save_checkpoint: .* stopped by a signal for 0\.5 s"):
        saving.finish(60)


@pytest.mark.parametrize("saving", [signal.SIGKILL], indirect=True)
def test_the_error_of_a_run_is_not_hidden_by_that_of_its_last_save(saving, caplog):
    def fail():
        with saving.finishing():
            raise ValueError("the run's own error")

    with pytest.raises(ValueError, match="the run's own error"):
        fail()
    assert "a save in the background: worker group" in caplog.text


def test_a_disk_that_refuses_is_counted_at_the_next_step_and_the_next_save_succeeds(
    toy, tmp_path, capsys
):
    class Run(OnStubbornDisk):
        def during_step(self):
            self.disk.is_full = self.global_steps <= 2
            self.disk.may_write.set()

        def finish_step(self, batch, step):
            super().finish_step(batch, step)
            if self.global_steps == 2:
                while self.checkpoint_manager._background.is_busy:
                    threading.Event().wait(0.01)
            self.counts_after[self.global_steps] = self.tripwires.counts["checkpoint_not_saved"]

        counts_after: dict = {}

    toy_run(toy, tmp_path, *ASYNC, trainer_class=Run)
    assert Run.counts_after == {1: 0, 2: 0, 3: 1, 4: 1}
    assert committed(capsys) == ["4"]
    assert [path.name for path in (tmp_path / "checkpoints").glob("*global_step*")] == [
        "global_step_4"
    ]


@pytest.mark.parametrize("is_async", ["false", "true"])
def test_a_last_save_that_fails_is_the_end_of_the_run_and_its_step_is_reported(
    toy, tmp_path, is_async
):
    class Run(OnStubbornDisk):
        def during_step(self):
            self.disk.is_full = self.global_steps == 4
            self.disk.may_write.set()

    changes = [*ASYNC, f"{ACTOR}.checkpoint.async_save={is_async}"]
    with pytest.raises(CheckpointSaveError, match=r"step 4 was not saved: .*ENOSPC"):
        toy_run(toy, tmp_path, *changes, trainer_class=Run)
    assert intact_step_at(tmp_path / "checkpoints" / "global_step_2").step == 2
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_a_run_that_fails_still_commits_what_it_was_saving(toy, tmp_path, capsys):
    class Run(OnStubbornDisk):
        def during_step(self):
            if self.global_steps == 3:
                threading.Timer(0.3, self.disk.may_write.set).start()
                raise KeyError("a mistake in a reward function")

    with pytest.raises(KeyError, match="a mistake"):
        toy_run(toy, tmp_path, *ASYNC, trainer_class=Run)
    assert committed(capsys) == ["2"]
    assert intact_step_at(tmp_path / "checkpoints" / "global_step_2").step == 2


@pytest.mark.slow
def test_saving_in_the_background_changes_no_number(toy, tmp_path, capsys):
    plain, synchronous = toy_run(
        toy, tmp_path / "a", *ASYNC, f"{ACTOR}.checkpoint.async_save=false"
    )
    behind, asynchronous = toy_run(toy, tmp_path / "b", *ASYNC)
    assert committed(capsys) == ["2", "4", "2", "4"]
    assert all(map(torch.equal, weights(synchronous).values(), weights(asynchronous).values()))
    for name in ("actor/grad_norm", "critic/score/mean"):
        assert [step[name] for step in plain] == [step[name] for step in behind]


def test_committed_steps_are_copied_to_the_second_folder(toy, tmp_path, capsys):
    remote = tmp_path / "remote"
    toy_run(toy, tmp_path, *ASYNC, f"trainer.default_hdfs_dir={remote}")
    assert (remote / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [intact_step_at(remote / f"global_step_{n}").step for n in (2, 4)] == [2, 4]


def test_a_run_that_is_asked_to_stop_leaves_when_its_save_is_committed(toy, tmp_path, capsys):
    class Run(OnStubbornDisk):
        def during_step(self):
            if self.global_steps == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                self.disk.may_write.set()

    _, trainer = toy_run(toy, tmp_path, *ASYNC, trainer_class=Run)
    assert committed(capsys) == ["2", "3"]
    assert trainer.checkpoint_manager.committed_step == 3
