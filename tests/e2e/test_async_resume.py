"""Asynchronous runs of several turns that are killed: the same command continues them, bit for bit.

A moment is a share of the time that the undisturbed run takes, so it falls anywhere: into an engine
that samples, rows that are settled, an update, a publish, a save. A run that ends before its moment
has ended well.
"""

import json
import os
import random
import signal
import time

import pytest
import torch

from tests.children import children
from tests.toy import toy_run
from tests.trainer.test_async_placing import separate
from tests.trainer.test_asynchronous import STEPS, Records, colocated

NUM_MOMENTS = 20
BY_DEFAULT = (11,)
PLACES = {
    "on the trainer's device": lambda folder: [*colocated(2, folder), "trainer.save_freq=1"],
    "on one of its own": separate,
}


class Writes(Records):
    """Tells a file what every step trained on, also one that is trained again."""

    seen = []

    def annotate(self, batch, step):
        batch = super().annotate(batch, step)
        with open(os.environ["TRAINED"], "a") as file:
            file.write(json.dumps(type(self).seen[-1]) + "\n")
        return batch


def start(toy, output, place):
    output.mkdir(exist_ok=True)
    child = children.Process(target=_train, args=(toy, output, place))
    child.start()
    return child


def _train(toy, output, place):
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    file = (output / "output.txt").open("a")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    os.environ["TRAINED"] = str(output / "trained.jsonl")
    _, trainer = toy_run(toy, output, *PLACES[place](output), trainer_class=Writes)
    trainer.stop_workers()


def outcome(output):
    """What each step trained on, one entry for each time, and the last checkpoint."""
    lines = [json.loads(line) for line in (output / "trained.jsonl").read_text().splitlines()]
    folder = output / "checkpoints" / f"global_step_{STEPS}" / "actor"
    files = {p.name: p.read_bytes() for p in folder.rglob("*.safetensors")}
    assert files
    return [(step, json.dumps(rows)) for step, rows in lines], files


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    found = {}

    def of(place):
        if place not in found:
            output, before = tmp_path_factory.mktemp("straight"), time.perf_counter()
            child = start(toy, output, place)
            child.join(timeout=200)
            assert child.exitcode == 0, (output / "output.txt").read_text()[-2000:]
            found[place] = (*outcome(output), time.perf_counter() - before)
        return found[place]

    return of


def cases():
    for place in PLACES:
        for number in range(NUM_MOMENTS):
            is_default = number in BY_DEFAULT and place == "on the trainer's device"
            marks = [] if is_default else [pytest.mark.slow]
            yield pytest.param(place, number, marks=marks, id=f"{place}, moment {number}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "number"), [*cases()])
def test_a_run_killed_at_any_moment_continues_bit_for_bit(toy, tmp_path, straight, place, number):
    trained, files, seconds = straight(place)
    draw = random.Random(number)
    codes = []
    for _ in range(2):  # killed twice: also while it continues
        child = start(toy, tmp_path, place)
        child.join(timeout=seconds * draw.uniform(0.1, 1.0))
        child.kill()
        child.join(timeout=100)
        codes.append(child.exitcode)
        if child.exitcode == 0:
            break
    if codes[-1] != 0:
        assert codes[-1] == -signal.SIGKILL, (tmp_path / "output.txt").read_text()[-2000:]
        child = start(toy, tmp_path, place)
        child.join(timeout=200)
        assert child.exitcode == 0, (tmp_path / "output.txt").read_text()[-2000:]
    found, found_files = outcome(tmp_path)
    assert set(found) == set(trained), "each time a step is trained, it is the step of that run"
    assert sorted({step for step, _ in found}) == list(range(1, STEPS + 1))
    assert found_files == files
