"""What a process finds out about its machine before torch is loaded."""

import os
import subprocess
import sys

import pytest

from verl.utils import environment
from verl.utils.environment import busy_seconds, choose_openmp, cpu_quota, demand_of_others


@pytest.fixture
def free(monkeypatch):
    """No choice of the user's, and none of ours left behind."""
    for name in ("OMP_NUM_THREADS", *environment.WAITING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_chosen", set())


@pytest.fixture
def neighbour():
    """A process that keeps a processor busy."""
    program = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield
        process.kill()


def test_a_busy_neighbour_is_noticed(neighbour):
    assert "processors" in demand_of_others()


def test_openmp_is_told_to_sleep_before_torch_is_loaded(free, neighbour):
    program = """
from verl.utils.environment import choose_openmp
print(choose_openmp())
import torch
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "threads sleep while they wait, because " in done.stdout
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_a_quiet_machine_spins_briefly_and_says_nothing(free, monkeypatch):
    monkeypatch.setattr(environment, "demand_of_others", lambda: None)
    assert choose_openmp() == []
    assert os.environ["GOMP_SPINCOUNT"] == str(environment.QUIET_SPINS)


@pytest.mark.parametrize("name", environment.WAITING)
def test_what_the_user_has_set_stays(free, monkeypatch, neighbour, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    assert choose_openmp() == []
    assert dict(os.environ) == before
    assert environment.has_chosen_threads()


def test_a_containers_quota_decides_how_many_threads_there_are(free, monkeypatch):
    monkeypatch.setattr(environment, "allowed_cores", lambda: set(range(64)))
    monkeypatch.setattr(environment, "cpu_quota", lambda: 2.5)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    (notice,) = choose_openmp()
    assert notice.startswith("threads: 2, because the container may use 2.5 of 64 processors")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert not environment.has_chosen_threads()  # ranks divide them


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("3:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1"}, None),
        (
            "3:cpu:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("", {}, None),
    ],
)
def test_the_quota_is_the_tightest_on_the_way_to_the_root(tmp_path, groups, files, expected):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path, tmp_path / "groups") == expected


def test_only_the_processors_of_this_process_are_looked_at(tmp_path):
    stat = tmp_path / "stat"
    lines = ["cpu 9 9 9 9 9 9 9 9 0 0", "cpu0 100 0 0 7 7 0 0 0 0 0", "cpu1 1 2 3 7 7 4 5 6 0 0"]
    stat.write_text("\n".join([*lines, "intr 12345"]))
    second = os.sysconf("SC_CLK_TCK")
    assert busy_seconds({1}, stat) == 21 / second
    assert busy_seconds({0, 1}, stat) == 121 / second
    assert busy_seconds({0}, tmp_path / "none") is None
