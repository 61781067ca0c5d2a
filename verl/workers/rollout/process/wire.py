"""Messages between a process and the engine it started: frames with JSON over a Unix socket.

Both ends come from one `socketpair`, so nobody else can connect; both still prove that they know a
token before anything is read, since a wrong descriptor may be open at that number. A message is a
JSON object in a frame of `verl.utils.line`. The frames of each direction are numbered one after
another, so that none is lost, repeated or out of its order; calls and answers have numbers of their
own (`messages`). Python writes floats so that they read back as they were. A message may bring one
open file descriptor along.
"""

import json
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from verl.utils.line import (
    HEADER,
    BrokenLineError,
    check_body,
    close_in_forks,
    header_of,
    parse_header,
)
from verl.workers.weight_sync.bucket import ChannelError
from verl.workers.weight_sync.tcp import Stream, key_of

MAX_MESSAGE_BYTES = 64 << 20
READ_BYTES = 1 << 20
SEND_SECONDS = 600.0
"""A peer that takes nothing for so long is stuck; long before that its silence is noticed."""

_DESCRIPTOR = "descriptor"

Message = dict[str, Any]


class WireError(RuntimeError):
    """The other end closed the line, does not know the token, or does not speak this protocol."""


class WireClosedError(WireError):
    """The other end closed the line, or is gone."""


class Wire:
    """One end. Any thread may send; one reads."""

    def __init__(self, connection: socket.socket) -> None:
        close_in_forks(connection)
        self._connection = connection
        self._connection.settimeout(SEND_SECONDS)
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def handshake(self, token: str, *, starts: bool, timeout_seconds: float) -> None:
        """Prove to each other that both know the token; the one that `starts` signs first."""
        stream = Stream(self._connection, "the other end")
        stream.start_clock(timeout_seconds)
        try:
            stream.prove_and_check(key_of(token), first=starts)
        except ChannelError as error:
            raise WireError(f"no handshake with the engine's process: {error}") from error
        self._connection.settimeout(SEND_SECONDS)

    def send(self, encoded: bytes, descriptor: int | None = None) -> None:
        """Send what `encode` made; `descriptor` stays open here."""
        with self._sending:
            self._send(encoded, descriptor)

    def send_if_free(self, encoded: bytes) -> None:
        """Send unless another thread is sending something, which is as good as a heartbeat."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(encoded, None)
            finally:
                self._sending.release()

    def arrived(self, timeout_seconds: float) -> list[Message]:
        """All messages that are here; waits for some if there are none."""
        messages: list[Message] = []
        while self._has_bytes(0.0 if messages else timeout_seconds):
            self._read()
            messages += self._whole_messages()
            timeout_seconds = 0.0
        return messages

    def has_hung_up(self, timeout_seconds: float) -> bool:
        """Wait for the other end to be closed; does not read, so any thread may ask."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(timeout_seconds * 1000))

    def close(self) -> None:
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _send(self, encoded: bytes, descriptor: int | None) -> None:
        try:
            frame = header_of(self._num_sent, encoded) + encoded
            self._num_sent += 1
            sent = 0
            if descriptor is not None:
                sent = socket.send_fds(self._connection, [frame], [descriptor])
            self._connection.sendall(memoryview(frame)[sent:])
        except OSError as error:  # closed, or full for SEND_SECONDS
            raise WireClosedError(f"the other end takes nothing any more: {error}") from error

    def _has_bytes(self, timeout_seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_seconds * 1000))

    def _read(self) -> None:
        try:
            content, descriptors, _, _ = socket.recv_fds(self._connection, READ_BYTES, 1)
        except OSError as error:
            raise WireClosedError(f"the line broke: {error}") from error
        self._descriptors.extend(descriptors)
        if not content:
            raise WireClosedError("the other end closed the line")
        self._bytes += content

    def _whole_messages(self) -> Iterator[Message]:
        while len(self._bytes) >= HEADER.size:
            try:
                header = parse_header(self._bytes[: HEADER.size], MAX_MESSAGE_BYTES)
                if header.number != self._num_received:
                    text = f"message {header.number} came instead of {self._num_received}"
                    raise BrokenLineError(text)
                end = HEADER.size + header.length
                if len(self._bytes) < end:
                    return
                content = bytes(self._bytes[HEADER.size : end])
                check_body(header, content)
            except BrokenLineError as error:
                raise WireError(str(error)) from error
            self._num_received += 1
            message = decode(content)
            del self._bytes[:end]
            if _DESCRIPTOR in message:
                message[_DESCRIPTOR] = self._next_descriptor()
            yield message

    def _next_descriptor(self) -> int:
        if not self._descriptors:
            raise WireError("a message announced a descriptor that did not come with it")
        return self._descriptors.popleft()


def encode(message: Message) -> bytes:
    """A message as it travels; ValueError if it is too long for one."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message to the engine's process has {len(content)} bytes; the limit is "
            f"{MAX_MESSAGE_BYTES}: shorten the prompt"
        )
    return content


def decode(content: bytes) -> Message:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message of {len(content)} bytes is not JSON: {error!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message is a {type(message).__name__}; it must be an object")
    return message
