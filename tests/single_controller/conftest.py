"""Launchers: the same test body runs on every back-end.

`launcher` and `pair_launcher` start groups that end with the test; `calculators` is a group that
many tests share, because starting processes is what takes the time here.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.single_controller.workers import Calculator
from verl.single_controller import ResourcePool, WorkerGroup
from verl.single_controller.controllers import controllers

RAY_RANKS = 2


class Launcher:
    """Starts groups of `world_size` ranks on one back-end."""

    kind = "local"

    def __init__(self, world_size: int, **options) -> None:
        self.world_size = world_size
        self.options = options
        self._groups = ExitStack()

    @property
    def controller(self):
        return controllers[self.kind]

    def spec(self, worker_class, *args, **kwargs):
        return self.controller.class_with_init_args(worker_class, *args, **kwargs)

    def pool(self):
        return ResourcePool([self.world_size])

    def start(self, worker_class, *args, **kwargs) -> WorkerGroup:
        return self.start_spec(self.spec(worker_class, *args, **kwargs))

    def start_spec(self, spec) -> WorkerGroup:
        group = self.controller.worker_group(self.pool(), spec, **self.options)
        self._groups.callback(group.shutdown)
        return group

    def close(self) -> None:
        self._groups.close()


class RayLauncher(Launcher):
    kind = "ray"

    def __init__(self, pool) -> None:
        super().__init__(pool.world_size)
        self._pool = pool

    def pool(self):
        return self._pool


BACKENDS = [
    pytest.param(("local", 1), id="local-1"),
    pytest.param(("local", 2), id="local-2"),
    pytest.param(("local", 4), id="local-4"),
    pytest.param(("ray", RAY_RANKS), id="ray-2", marks=pytest.mark.ray),
]
PAIRS_OF_PROCESSES = [param for param in BACKENDS if param.id in ("local-2", "ray-2")]
SINGLE_RANKS = [
    pytest.param(("local", 1), id="local-1"),
    pytest.param(("child", 1), id="child-1"),
    pytest.param(("ray", 1), id="ray-1", marks=pytest.mark.ray),
]


@pytest.fixture(scope="package")
def ray_pool(ray_cluster):
    from verl.single_controller.ray import RayResourcePool

    pool = RayResourcePool([RAY_RANKS], use_gpu=False, max_colocate_count=8)
    yield pool
    pool.release()


def new_launcher(request: pytest.FixtureRequest) -> Launcher:
    kind, world_size = request.param
    if kind == "ray":
        from verl.single_controller.ray import split_resource_pool

        pool = request.getfixturevalue("ray_pool")
        return RayLauncher(split_resource_pool(pool, [world_size, RAY_RANKS - world_size])[0])
    return Launcher(world_size, **({"in_process": False} if kind == "child" else {}))


@pytest.fixture(params=SINGLE_RANKS)
def launcher(request) -> Iterator[Launcher]:
    launcher = new_launcher(request)
    yield launcher
    launcher.close()


@pytest.fixture(params=PAIRS_OF_PROCESSES)
def pair_launcher(request) -> Iterator[Launcher]:
    """Two ranks that are processes of their own."""
    launcher = new_launcher(request)
    yield launcher
    launcher.close()


@pytest.fixture(scope="package", params=BACKENDS)
def calculators(request) -> Iterator[WorkerGroup]:
    """A group of `Calculator(offset=100)` that tests leave as they found it."""
    launcher = new_launcher(request)
    yield launcher.start(Calculator, offset=100)
    launcher.close()
