"""Killed producers and a killed data plane on Ray are named, and who waits is told at once."""

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from verl.data_plane import DataPlane, PlaneLost, Ready, RowsLost, connect, create

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

LONG = 120.0


@pytest.fixture
def plane() -> Iterator[DataPlane]:
    one = create("ray", f"faults-{uuid.uuid4().hex[:8]}")
    yield one
    one.delete(list(one.entries()))


class Producer:
    """Reserves three entries, completes one, and is killed."""

    def start(self, address: dict[str, Any]) -> int:
        plane = connect(address)
        plane.reserve(["p/0", "p/1", "p/2"], producer="agent-loop-3")
        plane.put("p/0", {"ids": torch.arange(300_000)}, producer="agent-loop-3")
        return os.getpid()


def test_rows_of_a_killed_producer_are_lost_and_it_is_named(plane: DataPlane):
    actor = ray.remote(Producer).options(num_cpus=0).remote()
    pid = ray.get(actor.start.remote(plane.address()), timeout=LONG)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RowsLost, match=r"'p/1' was never completed, its producer agent-loop-3"):
        plane.wait(Ready(keys=("p/0", "p/1")), LONG)
    states = {key: receipt.state for key, receipt in plane.entries("p").items()}
    assert states == {"p/0": "complete", "p/1": "lost", "p/2": "lost"}


def test_a_killed_data_plane_is_named_with_the_way_out():
    plane = create("ray", f"killed-{uuid.uuid4().hex[:8]}")
    plane.put("p/0", {"ids": torch.arange(3)})
    pid = ray.get(plane._book.__ray_call__.remote(pid_of), timeout=LONG)  # pyright: ignore
    waiting = plane._book.watch.remote(Ready(keys=("p/9",)), LONG)  # pyright: ignore
    os.kill(pid, signal.SIGKILL)
    ready, _ = ray.wait([waiting], timeout=LONG)
    assert ready  # who waited was told, before its time was up
    for call in (
        lambda: plane.get(["p/0"]),
        lambda: plane.put("p/1", {"ids": torch.arange(3)}),
        lambda: plane.wait(Ready(keys=("p/1",)), LONG),
    ):
        with pytest.raises(PlaneLost, match=rf"{plane.name}' is gone: .*resumes from its last"):
            call()


def pid_of(worker: Any) -> int:
    return os.getpid()
