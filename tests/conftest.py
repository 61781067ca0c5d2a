"""What holds for every test: no bf16 crash, no spinning threads, a seed, nothing left behind.

Under xdist the tests of a file run on one worker, and all tests on Ray run on the same one, where
they share a cluster. Folders whose tests take seconds each come first, so that what is left at the
end are short files.
"""

import faulthandler
import gc
import logging
import os
import re
import signal
import time

# Must be set before torch is imported: AMX that is advertised but cannot run dies with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.pace import PATIENCE
from verl.single_controller.local.fork_server import keeping_servers

gc.disable()  # until all tests are collected: what is imported meanwhile stays

# The same examples in every run: what a colleague's run has found is found again.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("suite")

# A shell that starts a command in the background lets it ignore Ctrl-C, and so would our children.
signal.signal(signal.SIGINT, signal.default_int_handler)

RAY_ID = re.compile(r"(?<![a-z])ray(?![a-z])")
"""What the id of each test on Ray contains: `test_ray.py`, `[ray-2]`, `test_parts_on_ray`."""


LONG_FIRST = (
    *("ray", "tests/e2e", "tests/trainer", "tests/chaos", "tests/single_controller"),
    *("tests/server", "tests/workers", "tests/data_plane", "tests/examples", "tests/compat"),
)
"""Scopes in the order in which they start; tests on Ray take longest and wait for processes."""


def order_of(scope: str) -> int:
    known = (i for i, start in enumerate(LONG_FIRST) if scope.startswith(start))
    return next(known, len(LONG_FIRST))


def is_on_ray(item: pytest.Item) -> bool:
    return item.get_closest_marker("ray") is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    yield
    for item in items if PATIENCE > 1 else ():
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    items.sort(key=is_on_ray)  # one after another, at the end of the session or of their group
    unnamed = [item.nodeid for item in items if is_on_ray(item) and not RAY_ID.search(item.nodeid)]
    if unnamed:
        raise pytest.UsageError(f"tests on Ray need the word ray in their ids: {unnamed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if is_on_ray(item) and (nextitem is None or not is_on_ray(nextitem)):
        import ray

        ray.shutdown()  # reward workers and others use a cluster when there is one


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class FilesAndRay(LoadFileScheduling):
        is_sorted = False

        def _split_scope(self, nodeid: str) -> str:
            return "ray" if RAY_ID.search(nodeid) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if not self.is_sorted:  # by the number of tests, until here
                for scope in sorted(self.workqueue, key=order_of):
                    self.workqueue.move_to_end(scope)
                self.is_sorted = True
            super()._assign_work_unit(node)

    return FilesAndRay(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What imports have made lives as long as the session: the collector need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """Commands have Hydra set up logging, to a stream that pytest closes after the test: whoever
    logs later, in another test, would be told of an error there."""
    root = logging.getLogger()
    handlers, level, folder = root.handlers[:], root.level, os.getcwd()
    yield
    if root.handlers != handlers:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
    root.setLevel(level)
    assert os.getcwd() == folder, "the test has changed the working directory"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_rank_left_behind() -> Iterator[None]:
    """A worker group in this process makes it rank 0 of 1 until it is gone; trainers hold theirs in
    reference cycles, which only the collector ends. A process group would be inherited by forks."""
    yield
    gc.collect()
    gc.freeze()  # what is left, such as modules and caches, stays: nobody need look at it again
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ray_cluster() -> None:
    """The one cluster of the session, with room for every group that a test starts; it ends after
    the last test on Ray."""
    import ray

    ray.init(num_cpus=24, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    logging.getLogger("ray").handlers.clear()  # their stream may be that of the first test alone


@pytest.fixture(autouse=True, scope="session")
def _at_rest() -> Iterator[None]:
    """A thread that a test has left and that works on delays all later tests, and nothing shows."""
    yield
    gc.collect()
    start = time.process_time()
    time.sleep(0.5)
    if time.process_time() - start > 0.05:
        faulthandler.dump_traceback()
        pytest.fail("a thread works on after the last test; stderr shows where each thread is")


@pytest.fixture(autouse=True, scope="session")
def _fork_servers() -> Iterator[None]:
    """The ranks of all tests come from one fork server; a run would end it with its own ranks."""
    with keeping_servers():
        yield
