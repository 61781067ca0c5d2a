"""Calls and replies between two processes of ours: numbered frames over a stream socket.

    frame    mark (4 bytes), kind (1), number (8), length (8), checksum (4), body

The caller numbers its calls, and a reply has the number of its call. Bytes that wait on the line
when a call begins, a frame that is cut, damaged, too long or of another number: all of these are a
`BrokenLineError`. Whoever meets one ends the other process, since nobody can tell any more which
reply belongs to which call. Numbers start at random: a frame of another line does not fit either.

An end belongs to the process that opened it: in a fork of that process it is closed, so that a copy
can neither answer nor keep the line from ending.

What a body means is not known here. Only the standard library is imported, for processes that
import nothing else of ours.
"""

import itertools
import os
import select
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("!4sBQQI")
MARK = b"verl"
MAX_BYTES = 64 << 20
_CHECKED_BYTES = 1 << 16


_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_in_forks(end: socket.socket) -> None:
    """Close the copies of `end` that forks of this process get."""
    _ends.add(end)


def _close_ends() -> None:
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


class BrokenLineError(RuntimeError):
    """What came cannot be the next frame of this line."""


Octets = bytes | bytearray | memoryview


class Frame(NamedTuple):
    number: int
    kind: int
    body: bytearray


class Header(NamedTuple):
    number: int
    kind: int
    length: int
    checksum: int


def call_numbers() -> Iterator[int]:
    """Ascending, from a random place."""
    return itertools.count(int.from_bytes(os.urandom(6), "big"))


def header_of(number: int, body: Octets, kind: int = 0) -> bytes:
    return HEADER.pack(MARK, kind, number, len(body), checksum(body))


def parse_header(octets: bytes | bytearray, max_bytes: int = MAX_BYTES) -> Header:
    mark, kind, number, length, expected = HEADER.unpack(octets)
    if mark != MARK:
        raise BrokenLineError(f"a frame begins with {mark!r} instead of {MARK!r}")
    if length > max_bytes:
        raise BrokenLineError(f"a frame of {length} bytes was announced; the limit is {max_bytes}")
    return Header(number, kind, length, expected)


def check_body(header: Header, body: Octets) -> None:
    if checksum(body) != header.checksum:
        raise BrokenLineError(f"the {header.length} bytes of frame {header.number} are damaged")


def checksum(body: Octets) -> int:
    """Of both ends of a long body: bytes that are lost, added or moved shift the second."""
    view = memoryview(body)
    if len(view) <= 2 * _CHECKED_BYTES:
        return zlib.crc32(view)
    return zlib.crc32(view[-_CHECKED_BYTES:], zlib.crc32(view[:_CHECKED_BYTES]))


class Line:
    """One end. One thread may send while another receives.

    Deadlines are times of `time.monotonic`; without one the call waits as long as the other process
    lives.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> None:
        close_in_forks(connection)
        self._connection = connection
        self._max_bytes = max_bytes

    def close(self) -> None:
        self._connection.close()

    def has_bytes(self, wait_seconds: float = 0.0) -> bool:
        """Whether there is something to read, if only the end."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(wait_seconds * 1000))

    def send(
        self,
        number: int,
        body: Octets,
        *,
        kind: int = 0,
        deadline: float | None = None,
    ) -> None:
        for part in (header_of(number, body, kind), body):
            self._connection.settimeout(_remaining(deadline))
            self._connection.sendall(part)

    def receive(self, *, deadline: float | None = None) -> Frame | None:
        """The next frame; None when the other end was closed between two of them."""
        octets = self._read(HEADER.size, deadline)
        if not octets:
            return None
        header = parse_header(octets, self._max_bytes)
        body = self._read(header.length, deadline)
        if len(body) < header.length:
            raise BrokenLineError(f"the line ended before the body of frame {header.number}")
        check_body(header, body)
        return Frame(header.number, header.kind, body)

    def begin_call(self, number: int, body: Octets, *, deadline: float) -> None:
        """Send a call. Nothing may have been said since the last reply; EOFError if the other
        process has ended."""
        if self.has_bytes():
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise EOFError(f"the other process ended before call {number}")
            raise BrokenLineError(f"something came before call {number} was made")
        self.send(number, body, deadline=deadline)

    def end_call(self, number: int, *, deadline: float) -> bytearray:
        """The body of the reply; EOFError if the other process has ended instead."""
        frame = self.receive(deadline=deadline)
        if frame is None:
            raise EOFError(f"the other process ended during call {number}")
        if frame.number != number:
            raise BrokenLineError(f"a reply to call {frame.number} came during call {number}")
        return frame.body

    def _read(self, length: int, deadline: float | None) -> bytearray:
        """Empty if the line has ended, complete otherwise."""
        octets = bytearray(length)
        rest = memoryview(octets)
        while rest:
            self._connection.settimeout(_remaining(deadline))
            num_read = self._connection.recv_into(rest)
            if not num_read:
                if len(rest) < length:
                    raise BrokenLineError("the line ended in the middle of a frame")
                return bytearray()
            rest = rest[num_read:]
        return octets


def _remaining(deadline: float | None) -> float | None:
    """Zero would mean not to wait at all, and raise something else than TimeoutError."""
    return None if deadline is None else max(1e-6, deadline - time.monotonic())
