"""What a program in the sandbox gets, and what comes back."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import pytest

from tests.pace import wait_until
from tests.utils.sandbox.processes import count_processes
from verl.utils.sandbox import Limits, Sandbox, SandboxUnavailable
from verl.utils.sandbox.sandbox import ENVIRONMENT


def test_input_goes_in_and_both_outputs_come_out(sandbox):
    result = sandbox.run(
        "import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr)", b"abc"
    )
    assert (result.status, result.stdout, result.stderr) == ("finished", b"cba\n", b"e\n")
    assert result.exit_code == 0
    assert result.is_finished


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit(250)", 250),  # also what a sandbox that was never built would say
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_a_program_that_fails_says_how(sandbox, program, exit_code):
    result = sandbox.run(program)
    assert (result.status, result.exit_code) == ("failed", exit_code)


def test_input_of_a_megabyte_arrives_even_if_it_is_not_read(sandbox):
    million = b"x" * 2**20
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", million).stdout == b"1048576\n"
    assert sandbox.run("print('done')", million).stdout == b"done\n"


def test_the_environment_holds_nothing_of_ours(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = sandbox.run("import json, os; print(json.dumps(dict(os.environ)))")
    assert json.loads(result.stdout) == ENVIRONMENT


def test_the_program_is_nobody_and_can_become_no_one_else(sandbox):
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
print(os.getuid(), os.getgid(), os.getgroups(), os.getpid())
try:
    os.setuid(0)
except PermissionError:
    print("refused")
print(libc.prctl(39, 0, 0, 0, 0))  # PR_GET_NO_NEW_PRIVS
"""
    lines = sandbox.run(program).stdout.decode().splitlines()
    user, group, *_ = lines[0].split()
    assert (user, group) == ("1000", "1000")
    assert lines[1:3] == ["refused", "1"]


def test_only_the_three_standard_files_are_open(sandbox):
    program = """
import os
found = []
for number in range(4096):
    try:
        os.fstat(number)
    except OSError:
        continue
    found.append(number)
print(found)
"""
    held = [os.open("/etc/passwd", os.O_RDONLY) for _ in range(40)]  # ours, at many numbers
    try:
        assert sandbox.run(program).stdout == b"[0, 1, 2]\n"
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_only_the_scratch_directory_can_be_written(sandbox):
    program = """
import os
open("/tmp/a", "w").write("x")
for folder, _, _ in os.walk("/"):
    if folder.startswith("/tmp"):
        continue
    try:
        open(folder + "/x", "w")
    except OSError:
        continue
    print(folder)
try:
    os.chmod("/python/lib", 0o777)
except OSError:
    print("read-only")
"""
    assert sandbox.run(program).stdout == b"read-only\n"


def test_a_run_finds_nothing_of_the_run_before_it(sandbox):
    sandbox.run("open('/tmp/left', 'w').write('x')")
    assert sandbox.run("import os; print(os.listdir('/tmp'))").stdout == b"['main.py']\n"


def test_scratch_files_cannot_be_executed(sandbox):
    program = """
import os, shutil
shutil.copy("/python/bin/" + os.listdir("/python/bin")[0], "/tmp/copy")
os.chmod("/tmp/copy", 0o755)
try:
    os.execv("/tmp/copy", ["copy"])
except PermissionError:
    print("refused")
"""
    assert sandbox.run(program).stdout == b"refused\n"


def test_packages_are_there_only_when_asked_for(sandbox):
    program = "import numpy; print(numpy.ones(3).sum())"
    assert Sandbox(packages=("numpy",)).run(program).stdout == b"3.0\n"
    assert b"ModuleNotFoundError" in sandbox.run(program).stderr
    assert b"ModuleNotFoundError" in sandbox.run("import verl").stderr
    assert b"ModuleNotFoundError" in sandbox.run("import pytest").stderr


def test_calls_that_would_open_the_sandbox_are_refused(sandbox):
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno(status): return ctypes.get_errno() if status == -1 else "succeeded"
print(errno(libc.unshare(0x10000000)))
print(errno(libc.ptrace(16, 1, None, None)))
print(errno(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
print(errno(libc.memfd_create(b"x", 0)))
print(errno(libc.shmget(0, 4096, 0o1600)))
print(errno(libc.syscall(250, 0, -3, 0)))  # keyctl: the session keyring
print(errno(libc.socket(40, 1, 0)))  # vsock, to the hypervisor
print(errno(libc.syscall(56, 0x10000011, 0, 0, 0, 0)))  # clone into a user namespace
"""
    errors = sandbox.run(program).stdout.split()
    assert errors[:5] == [b"1"] * 5
    if os.uname().machine == "x86_64":
        assert errors[5:] == [b"1", b"97", b"1"]


def test_threads_of_one_process_run_programs_side_by_side(sandbox):
    outputs = {}

    def run(number: int) -> None:
        outputs[number] = sandbox.run(f"print({number} ** 2)").stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outputs == {n: f"{n * n}\n".encode() for n in range(6)}


def test_an_event_loop_stays_free_while_a_program_runs(sandbox):
    async def main() -> tuple[bytes, int]:
        task = asyncio.create_task(sandbox.run_async("import time; time.sleep(0.3); print(1)"))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        return (await task).stdout, turns

    output, turns = asyncio.run(main())
    assert output == b"1\n"
    assert turns > 5


def test_a_program_dies_with_the_process_that_started_it(sandbox):
    name = f"orphan{os.getpid() % 10**6}"
    script = f"""
from verl.utils.sandbox import Limits, Sandbox
Sandbox(Limits(timeout_seconds=60)).run('''
import ctypes, time
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
time.sleep(60)
''')
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: count_processes(name) == 1)
    finally:
        parent.kill()
        parent.wait(60)
    wait_until(lambda: count_processes(name) == 0)


def test_without_namespaces_nothing_runs_and_the_error_tells_the_way_out():
    script = """
import os
from verl.utils.reward_score import prime_code
from verl.utils.sandbox.jail import kernel
kernel.REFUSED_CALLS = {"unshare": kernel.REFUSED_CALLS["unshare"]}
kernel.forbid_new_privileges()
kernel.install_filter(kernel.build_filter(os.uname().machine))
try:
    prime_code.compute_score("print(1)", {"inputs": ["1"], "outputs": ["1"]})
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert found.stdout.startswith(SandboxUnavailable.__name__.encode()), found
    assert b"creating namespaces: Operation not permitted" in found.stdout
    assert b"reward_model.sandbox_fusion.url" in found.stdout


@pytest.mark.parametrize("name", ["timeout_seconds", "memory_mb", "output_bytes", "max_processes"])
def test_a_limit_must_be_positive(name):
    with pytest.raises(ValueError, match=rf"Limits\.{name} is 0; it must be positive"):
        Limits(**{name: 0})


def test_a_program_beyond_a_megabyte_fails_without_being_run(sandbox):
    result = sandbox.run("#" * 2**20 + "#")
    assert (result.status, result.duration_seconds) == ("failed", 0.0)
    assert b"more than 1048576 characters" in result.stderr
