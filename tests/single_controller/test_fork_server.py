"""Ranks are forked by a warm server, and start as if they had been started by the driver."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.single_controller.workers import Calculator
from verl.single_controller import ClassWithInitArgs, ResourcePool, WorkerDied
from verl.single_controller.local import LocalWorkerGroup, fork_server

pytestmark = pytest.mark.skipif(not fork_server.is_available(), reason="ranks are spawned here")


def start(world_size=1, **options):
    spec = ClassWithInitArgs(Calculator)
    return LocalWorkerGroup(ResourcePool([world_size]), spec, in_process=False, **options)


def server_of(group):
    return group.workers[0].process.parent_pid


def test_groups_share_a_server_that_has_one_thread():
    groups = start(), start()
    assert server_of(groups[0]) == server_of(groups[1])
    assert server_of(groups[0]) != os.getpid()
    tasks = Path(f"/proc/{server_of(groups[0])}/task").iterdir()
    names = [(task / "comm").read_text() for task in tasks]
    assert len([name for name in names if not name.startswith("jemalloc")]) == 1
    for group in groups:
        group.shutdown()


def test_a_rank_gets_the_environment_folder_and_streams_of_its_start(tmp_path, monkeypatch, capfd):
    start().shutdown()  # the server runs before anything changes
    monkeypatch.setenv("SET_AFTER_THE_SERVER", "yes")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    group = start(worker_env={"SET_BY_THE_GROUP": "too"})
    assert group.environment("SET_AFTER_THE_SERVER") == ["yes"]
    assert group.environment("SET_BY_THE_GROUP") == ["too"]
    assert group.environment("HOME") == [None]
    assert group.folder_and_words("said by a rank") == [str(tmp_path)]
    group.shutdown()
    assert capfd.readouterr().out == "said by a rank\n"


def test_a_variable_that_imports_read_gets_a_server_of_its_own(monkeypatch):
    group = start()
    monkeypatch.setenv("OMP_DYNAMIC", "FALSE")
    other = start()
    assert server_of(group) != server_of(other)
    group.shutdown()
    other.shutdown()


def test_the_log_of_a_run_needs_no_server_of_its_own(monkeypatch):
    group = start()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/elsewhere")
    other = start()
    assert server_of(group) == server_of(other)
    assert other.environment("VERL_FILE_LOGGER_PATH") == ["/elsewhere"]
    group.shutdown()
    other.shutdown()


def test_a_rank_collects_garbage_though_its_server_does_not():
    group = start()
    assert group.collects_garbage() == [True]
    group.shutdown()


def test_ranks_draw_different_numbers():
    group = start(2)
    first, second = group.draw()
    assert first != second
    group.shutdown()


def test_ranks_end_with_their_server_and_the_next_group_gets_another():
    group = start()
    server = server_of(group)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        group.sleep_on({0}, 60)
    fresh = start()
    assert server_of(fresh) != server
    assert fresh.add(1) == [1]
    group.shutdown()
    fresh.shutdown()


def test_a_server_that_is_killed_while_a_rank_starts_is_replaced():
    group = start()
    server = server_of(group)
    os.kill(server, signal.SIGSTOP)  # so that it has not answered yet
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
    fresh = start()
    assert server_of(fresh) != server
    assert fresh.add(1) == [1]
    group.shutdown()
    fresh.shutdown()
