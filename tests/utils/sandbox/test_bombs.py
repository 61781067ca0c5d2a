"""Programs that want more than their share: processes, memory, disk, output, time."""

import os
import resource

import pytest

from tests.pace import wait_until
from tests.utils.sandbox.processes import count_processes, peak_of
from verl.utils.sandbox import Limits

MEGABYTE = 2**20
BUSY_SECONDS = 30.0
"""What a busy machine may add to a limit of time; the programs would take longer still."""


def named(name: str, program: str) -> str:
    """The program, and all it starts, carry the name where the host sees it."""
    return f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n{program}"


PROCESS_BOMBS = {
    "fork": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "daemons": """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(3):
                    os.close(number)
                time.sleep(100)
            os._exit(0)
    except OSError:
        time.sleep(0.01)
""",
    "threads": """
import threading, time
while True:
    try:
        threading.Thread(target=time.sleep, args=(100,)).start()
    except RuntimeError:
        time.sleep(0.01)
""",
    "spawn": """
import os, sys
while True:
    try:
        os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(100)"], {})
    except OSError:
        pass
""",
}


@pytest.mark.parametrize("kind", PROCESS_BOMBS)
def test_a_process_bomb_stays_within_32_and_leaves_no_survivor(sandbox, kind):
    name = f"{kind}{os.getpid() % 10**6}"
    for seconds in (0.7, 5.0, 20.0):  # a busy machine may not even start it in time
        with peak_of(name) as peak:
            program, limits = named(name, PROCESS_BOMBS[kind]), Limits(timeout_seconds=seconds)
            result = sandbox.run(program, limits=limits)
        assert result.status == "timeout"
        assert result.duration_seconds < seconds + BUSY_SECONDS
        if peak[0] >= 2 or kind == "spawn":
            break
    assert 2 <= peak[0] <= 32 or kind == "spawn"  # a spawned program has its own name
    wait_until(lambda: count_processes(name) == 0)


def test_a_daemon_does_not_outlive_its_program(sandbox):
    name = f"stay{os.getpid() % 10**6}"
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
os.wait()
"""
    result = sandbox.run(named(name, program))
    assert result.is_finished
    assert count_processes(name) == 0


MEMORY_BOMBS = {
    "list": "x = []\nwhile True: x.append(bytearray(10**6))",
    "one": "x = bytearray(10**10)",
    "number": "x = 1 << 10**11",
    "string": "x = 'x'\nwhile True: x += x",
    "children": """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 * 2**20)
        x[::4096] = b"x" * len(x[::4096])
        time.sleep(100)
time.sleep(100)
""",
    "mapped": "import mmap\nx = [mmap.mmap(-1, 10**8) for _ in range(100)]",
}


@pytest.mark.parametrize("kind", MEMORY_BOMBS)
def test_a_memory_bomb_ends_at_the_limit_and_costs_us_nothing(sandbox, kind):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = Limits(memory_mb=256, timeout_seconds=60)
    result = sandbox.run(MEMORY_BOMBS[kind], limits=limits)
    assert result.status in ("failed", "memory_limit")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 64 * MEGABYTE


def test_endless_recursion_ends_at_one_limit_or_another(sandbox):
    program = """
import sys
sys.setrecursionlimit(10**9)
def deeper(): return deeper()
deeper()
"""
    result = sandbox.run(program, limits=Limits(memory_mb=256, timeout_seconds=1.5))
    assert result.status in ("failed", "memory_limit", "timeout")
    assert result.duration_seconds < BUSY_SECONDS


def test_the_memory_of_all_processes_counts_together(sandbox):
    limits = Limits(memory_mb=256, timeout_seconds=60)
    assert sandbox.run(MEMORY_BOMBS["children"], limits=limits).status == "memory_limit"


DISK_BOMBS = {
    "one file": "f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)",
    "many files": "i = 0\nwhile True:\n  i += 1\n  open(str(i), 'wb').write(b'x' * 10**5)",
    "empty files": "i = 0\nwhile True:\n  i += 1\n  open(str(i), 'wb')",
    "sparse file": "f = open('big', 'wb'); f.truncate(2**40)",
    "sparse seek": "f = open('big', 'wb'); f.seek(2**40); f.write(b'x'); f.flush()",
}


@pytest.mark.parametrize("kind", DISK_BOMBS)
def test_a_disk_bomb_runs_out_of_room(sandbox, kind):
    limits = Limits(scratch_mb=8, timeout_seconds=60)
    result = sandbox.run(DISK_BOMBS[kind], limits=limits)
    assert result.status == "failed"
    assert b"OSError" in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_cut_at_64_kilobytes_and_the_program_stopped(sandbox, stream):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)")
    assert result.status == "output_limit"
    assert len(result.stdout) + len(result.stderr) == 64 * 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 64 * MEGABYTE


def test_output_of_exactly_the_limit_is_kept(sandbox):
    result = sandbox.run("print('x' * 9, end='')", limits=Limits(output_bytes=9))
    assert (result.status, result.stdout) == ("finished", b"x" * 9)
    result = sandbox.run("print('x' * 10, end='')", limits=Limits(output_bytes=9))
    assert (result.status, result.stdout) == ("output_limit", b"x" * 9)


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "input": "import os; r, w = os.pipe(); os.read(r, 1)",
    "masked signals": """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: time.sleep(1)
""",
    "ignored signals": """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "regular expression": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "attack on init": """
import os, signal, time
for number in signal.valid_signals():
    try:
        os.kill(1, number)
    except OSError:
        pass
time.sleep(1000)
""",
    "waiting child": """
import os, time
if os.fork():
    os.wait()
time.sleep(1000)
""",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_never_ends_is_cut_at_its_limit(sandbox, kind):
    result = sandbox.run(ENDLESS[kind], limits=Limits(timeout_seconds=0.4))
    assert result.status == "timeout"
    assert 0.4 <= result.duration_seconds < BUSY_SECONDS
