"""Nothing outside can be reached from inside: 50 tries, at listeners of ours among others."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from verl.utils.sandbox.sandbox import Sandbox

HOSTS = [
    "127.0.0.1",
    "127.0.1.1",
    "169.254.169.254",
    "1.1.1.1",
    "8.8.8.8",
    "10.0.0.1",
    "172.17.0.1",
]
HOSTS += ["192.168.0.1", "100.100.100.200"]
PORTS = [22, 80, 6379, 8265]  # 6379 and 8265 are Ray's
NAMES = ["localhost", "example.com", "metadata.google.internal", "huggingface.co"]

PROBE = """
import json, socket, sys
def connect(family, kind, address):
    with socket.socket(getattr(socket, family), getattr(socket, kind)) as tried:
        tried.settimeout(0.5)
        address = address if isinstance(address, str) else tuple(address)
        if kind == "SOCK_DGRAM":
            tried.sendto(b"hello", address)
        else:
            tried.connect(address)
def look_up(name):
    socket.getaddrinfo(name, 80)
def open_socket(family, kind, protocol):
    socket.socket(family, kind, protocol)
reached = []
for name, *arguments in json.load(sys.stdin):
    try:
        globals()[name](*arguments)
        reached.append([name, *arguments])
    except OSError:
        pass
print(json.dumps(reached))
"""


@pytest.fixture
def listeners(tmp_path) -> Iterator[list[list]]:
    """Addresses of sockets that this process listens on: TCP, UDP, a path, an abstract name."""
    sockets = []
    for family, kind, address in (
        ("AF_INET", "SOCK_STREAM", ("127.0.0.1", 0)),
        ("AF_INET", "SOCK_DGRAM", ("127.0.0.1", 0)),
        ("AF_UNIX", "SOCK_STREAM", str(tmp_path / "socket")),
        ("AF_UNIX", "SOCK_STREAM", f"\0sandbox-test-{threading.get_native_id()}"),
    ):
        listening = socket.socket(getattr(socket, family), getattr(socket, kind))
        listening.bind(address)
        if kind == "SOCK_STREAM":
            listening.listen()
        sockets.append((family, kind, listening))
    yield [["connect", f, k, _plain(s.getsockname())] for f, k, s in sockets]
    for _, _, listening in sockets:
        listening.close()


def _plain(address: object) -> object:
    """As it comes back from JSON."""
    if isinstance(address, tuple):
        return list(address)
    return address.decode() if isinstance(address, bytes) else address


def probes(listeners: list[list]) -> list[list]:
    tcp = [["connect", "AF_INET", "SOCK_STREAM", [host, port]] for host in HOSTS for port in PORTS]
    udp = [["connect", "AF_INET", "SOCK_DGRAM", [host, 53]] for host in ("1.1.1.1", "10.0.0.2")]
    six = [["connect", "AF_INET6", "SOCK_STREAM", [host, 80]] for host in ("::1", "fe80::1")]
    raw = [["open_socket", 2, 3, 1], ["open_socket", 17, 3, 0], ["open_socket", 40, 1, 0]]
    kernel = [["open_socket", 16, 3, 0], ["open_socket", 38, 5, 0]]  # netlink, crypto
    return listeners + tcp + udp + six + raw + kernel + [["look_up", name] for name in NAMES]


def test_no_probe_reaches_anything(sandbox: Sandbox, listeners: list[list]):
    tried = probes(listeners)
    assert len(tried) >= 50
    result = sandbox.run(PROBE, json.dumps(tried).encode())
    assert json.loads(result.stdout) == []


def test_outside_the_sandbox_the_listeners_are_reached(listeners: list[list]):
    command = [sys.executable, "-c", PROBE]
    result = subprocess.run(
        command, input=json.dumps(listeners).encode(), capture_output=True, timeout=60
    )
    assert json.loads(result.stdout) == listeners


def test_processes_inside_can_talk_to_each_other(sandbox: Sandbox):
    program = """
import os, socket
ours, theirs = socket.socketpair()
if os.fork() == 0:
    theirs.sendall(b"hello")
    os._exit(0)
print(ours.recv(5).decode())
"""
    assert sandbox.run(program).stdout == b"hello\n"
