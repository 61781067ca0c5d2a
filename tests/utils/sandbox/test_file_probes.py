"""Files of the host cannot be seen from inside: 200 ways to look, none succeeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.sandbox.sandbox import Sandbox

PATHS = [
    "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf",
    "/etc/ssl", "/etc", "/etc/os-release", "/root", "/root/.ssh", "/root/.bashrc", "/root/.netrc",
    "/home", "/var", "/var/log", "/var/run/docker.sock", "/run", "/opt", "/srv", "/mnt", "/boot",
    "/sys", "/sys/class/net", "/proc", "/proc/1/environ", "/proc/1/root/etc/passwd",
    "/proc/self/environ", "/proc/self/maps", "/proc/self/mountinfo", "/proc/self/fd",
    "/proc/mounts", "/proc/version", "/proc/meminfo", "/proc/net/tcp", "/dev/mem", "/dev/vda",
    "/dev/sda", "/dev/tty", "/dev/shm", "/dev/pts", "/usr/bin", "/usr/bin/python3", "/usr/share",
    "/usr/local", "/usr/sbin", "/bin", "/sbin"
]  # fmt: skip

WAYS = {
    "path": "lambda path: path",
    "dots": "lambda path: '/tmp/../../../../../..' + path",
    "link": "link",
    "old root": "lambda path: '/host' + path",
}

PROBE = """
import json, os, sys
def link(path):
    os.makedirs(SCRATCH, exist_ok=True)
    name = SCRATCH + "/link" + str(abs(hash(path)))
    if not os.path.islink(name):
        os.symlink(path, name)
    return name
found = []
for path in json.load(sys.stdin):
    place = (WAY)(path)
    try:
        if os.path.isdir(place):
            seen = os.listdir(place)
        else:
            seen = open(place, "rb").read(64)
    except OSError:
        continue
    if seen:
        found.append(path)
print(json.dumps(found))
"""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Known places, and files of ours: a token, a checkpoint, this test, installed packages."""
    for name in ("token", "checkpoint/model.safetensors", "id_rsa"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    ours = [str(tmp_path), *(str(path) for path in tmp_path.rglob("*") if path.is_file())]
    return [*PATHS, *ours, __file__, sys.prefix, str(Path(pytest.__file__).parent)]


def probe(way: str, scratch: str) -> str:
    return f"SCRATCH = {scratch!r}\n" + PROBE.replace("WAY", WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_no_probe_finds_a_file_of_the_host(sandbox: Sandbox, paths: list[str], way: str):
    result = sandbox.run(probe(way, "/tmp"), json.dumps(paths).encode())
    assert json.loads(result.stdout) == []


def test_there_are_200_probes_and_outside_the_sandbox_they_succeed(tmp_path, paths):
    assert len(paths) * len(WAYS) >= 200
    command = [sys.executable, "-c", probe("path", str(tmp_path / "links"))]
    result = subprocess.run(
        command, input=json.dumps(paths).encode(), capture_output=True, timeout=60
    )
    assert len(json.loads(result.stdout)) > len(paths) / 3


def test_no_file_inside_is_a_device_or_changes_the_user(sandbox):
    program = """
import os, stat
for folder, _, names in os.walk("/"):
    for name in names:
        mode = os.lstat(folder + "/" + name).st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and folder != "/dev"):
            print(folder, name)
print(sorted(os.listdir("/dev")))
print(os.statvfs("/usr/lib").f_flag & os.ST_NOSUID, os.statvfs("/tmp").f_flag & os.ST_NOSUID)
"""
    lines = sandbox.run(program).stdout.decode().splitlines()
    assert lines == ["['null', 'random', 'urandom', 'zero']", f"{os.ST_NOSUID} {os.ST_NOSUID}"]


def test_directory_handles_do_not_lead_out(sandbox):
    program = """
import os
os.chdir("/")
for _ in range(50):
    os.chdir("..")
print(sorted(os.listdir(".")))
"""
    names = sandbox.run(program).stdout.decode()
    assert "etc" not in names
    assert "host" not in names
    assert "proc" not in names
