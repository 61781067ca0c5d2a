"""The soak itself: a short one holds, and its checks see what they must see."""

import random

import pytest

from tests.chaos.shim import require_shim
from tests.chaos.soak import Soak, slope_of
from tests.chaos.soak_run import Process, Run, kind_of
from tests.utils.sandbox.needs import require_namespaces


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_soak_ends_as_the_undisturbed_run(tmp_path):
    require_namespaces()
    require_shim(tmp_path)
    soak = Soak(4.0, tmp_path / "soak", random.Random(1))
    assert soak.go(), soak.violations
    assert len(soak.events) > 3
    assert (tmp_path / "soak" / "soak.png").stat().st_size > 10_000


def test_growth_is_measured():
    times = [float(second) for second in range(60)]
    assert slope_of(times, [100 + 0.5 * second for second in times]) == pytest.approx(0.5)
    assert slope_of(times, [7.0] * 60) == pytest.approx(0.0, abs=1e-9)


def test_each_kind_of_process_is_known():
    everyone = {
        pid: Process(pid, parent, command)
        for pid, parent, command in [
            (1, 0, "python -m verl.trainer.main_ppo a=b"),
            (2, 1, "python -m verl.trainer.main_ppo a=b"),
            (3, 2, "python -m verl.trainer.main_ppo a=b"),
            (4, 1, "python -c from verl.single_controller.local.fork_server import main"),
            (5, 4, "python -c from verl.single_controller.local.fork_server import main"),
            (6, 5, "python -c from verl.workers.rollout.process.host import main"),
            (7, 3, "python -I -S -c from jail.supervisor import main; main()"),
            (8, 1, "sh"),
        ]
    }
    assert [kind_of(everyone[pid], 1, everyone) for pid in range(2, 9)] == [
        "fork server of rewards",
        "reward worker",
        "fork server of ranks",
        "rank",
        "engine",
        "sandbox",
        None,
    ]


def test_a_difference_in_weights_or_metrics_is_a_violation(tmp_path):
    soak = Soak(1.0, tmp_path, random.Random(0))
    for name in ("struck", "calm"):
        run = Run(tmp_path, tmp_path / name, {})
        folder = run.checkpoints / "global_step_1"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"1")
        run.metrics.write_text('{"step": 1, "data": {"loss": 0.5, "timing_s/step": 1}}\n')
        setattr(soak, name, run)
    soak.compare(1)
    assert soak.violations == []
    (soak.calm.checkpoints / "global_step_1" / "weights").write_bytes(b"2")
    soak.calm.metrics.write_text('{"step": 1, "data": {"loss": 0.25}}\n')
    soak.compare(2)
    assert [text.split()[0] for text in soak.violations] == ["steps", "metrics", "the"]
