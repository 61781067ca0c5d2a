"""Weights over TCP, for engines in processes or environments of their own.

The receiver listens, on the loopback interface unless told otherwise, and takes one sender. Both
prove that they know the token before anything else is read: each signs the other's random
challenge, so the token itself never travels. Then come frames: two lengths, the header, the
payload. What a frame may hold is bounded before memory is taken for it, and every exchange has one
deadline, however slowly the bytes trickle. The stream is not encrypted.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from verl.workers.weight_sync.bucket import (
    MAX_HEADER_BYTES,
    Bucket,
    ChannelError,
    Published,
    empty_payload,
)
from verl.workers.weight_sync.channel import (
    DEFAULT_BUCKET_BYTES,
    ReceivingChannel,
    SendingChannel,
    format_confirmation,
    parse_confirmation,
)

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT_SECONDS = 600.0
HANDSHAKE_SECONDS = 10.0
CHALLENGE_BYTES = 32
MAX_ANSWER_BYTES = 64
_NUMBER = 8  # bytes


class TcpListener:
    """A port on which a receiver waits for its sender."""

    def __init__(self, token: str, *, host: str = LOOPBACK, port: int = 0) -> None:
        self._key = key_of(token)
        self._socket = socket.create_server((host, port), backlog=1)
        self.host, self.port = self._socket.getsockname()[:2]

    def accept(
        self,
        *,
        max_bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> "TcpReceiver":
        """The first peer that knows the token; others are turned away."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            stream = Stream(self._next_peer(deadline, timeout_seconds), "the sender")
            try:
                stream.prove_and_check(self._key, first=False)
            except ChannelError:
                stream.close()
                if time.monotonic() >= deadline:
                    raise
                continue
            return TcpReceiver(stream, max_bucket_bytes, timeout_seconds)

    def close(self) -> None:
        self._socket.close()

    def _next_peer(self, deadline: float, timeout_seconds: float) -> socket.socket:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return sends_at_once(self._socket.accept()[0])
        except TimeoutError as error:
            raise ChannelError(
                f"no sender with the right token came to port {self.port} in {timeout_seconds:g} s"
            ) from error


class TcpSender(SendingChannel):
    """One connection to each receiver's (host, port)."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._streams: list[Stream] = []
        try:
            for host, port in addresses:
                self._streams.append(connect(host, port, token))
        except ChannelError:
            self.close()
            raise

    def send(self, bucket: Bucket) -> None:
        header, payload = bucket.header(), bucket.payload.cpu()
        sizes = len(header).to_bytes(_NUMBER, "big") + len(payload).to_bytes(_NUMBER, "big")
        for stream in self._streams:
            stream.start_clock(self._timeout_seconds)
            for part in (sizes, header, payload.numpy().data):
                stream.write(part)

    def confirmations(self) -> list[Published | None]:
        answers = []
        for stream in self._streams:
            stream.start_clock(self._timeout_seconds)
            length = min(MAX_ANSWER_BYTES, int.from_bytes(stream.read(_NUMBER), "big"))
            answers.append(parse_confirmation(stream.read(length)))
        return answers

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class TcpReceiver(ReceivingChannel):
    """The connection of one sender; made by `TcpListener.accept`."""

    def __init__(self, stream: "Stream", max_bucket_bytes: int, timeout_seconds: float) -> None:
        self._stream = stream
        self._max_bucket_bytes = max_bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._memory = empty_payload(0)

    def receive(self) -> Bucket:
        self._stream.start_clock(self._timeout_seconds)
        sizes = self._stream.read(2 * _NUMBER)
        num_header_bytes = int.from_bytes(sizes[:_NUMBER], "big")
        num_bytes = int.from_bytes(sizes[_NUMBER:], "big")
        if num_header_bytes > MAX_HEADER_BYTES or num_bytes > self._max_bucket_bytes:
            self._stream.close()
            raise ChannelError(
                f"the sender announced a header of {num_header_bytes} and a payload of {num_bytes} "
                f"bytes; the limits are {MAX_HEADER_BYTES} and {self._max_bucket_bytes}. Both "
                "sides need the same update_weights_bucket_megabytes"
            )
        header = self._stream.read(num_header_bytes)
        if len(self._memory) < num_bytes:
            self._memory = empty_payload(0)  # before the larger one is taken
            self._memory = empty_payload(num_bytes)
        payload = self._memory[:num_bytes]
        self._stream.read_into(payload)
        return Bucket.from_wire(header, payload)

    def confirm(self, held: Published | None) -> None:
        answer = format_confirmation(held)
        self._stream.start_clock(self._timeout_seconds)
        self._stream.write(len(answer).to_bytes(_NUMBER, "big") + answer)

    def close(self) -> None:
        self._stream.close()


class Stream:
    """A connection on which everything that belongs together has one deadline."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self._peer = peer
        self.start_clock(HANDSHAKE_SECONDS)

    def start_clock(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def prove_and_check(self, key: bytes, *, first: bool) -> None:
        """Sign the peer's challenge, and let it sign ours; who is `first` signs first."""
        own = secrets.token_bytes(CHALLENGE_BYTES)
        self.write(own)
        theirs = self.read(CHALLENGE_BYTES)
        own_role, their_role = (b"sender", b"receiver") if first else (b"receiver", b"sender")
        if first:
            self.write(hmac.digest(key, own_role + theirs + own, "sha256"))
        proof = self.read(CHALLENGE_BYTES)
        if not hmac.compare_digest(proof, hmac.digest(key, their_role + own + theirs, "sha256")):
            raise ChannelError(f"{self._peer} does not know the token of this run")
        if not first:
            self.write(hmac.digest(key, own_role + theirs + own, "sha256"))

    def read(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        self._fill(memoryview(content))
        return bytes(content)

    def read_into(self, payload: Tensor) -> None:
        self._fill(payload.numpy().data)

    def write(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while len(rest):
            rest = rest[self._within_deadline(lambda part=rest: self._connection.send(part)) :]

    def close(self) -> None:
        self._connection.close()

    def _fill(self, memory: memoryview) -> None:
        while len(memory):
            count = self._within_deadline(lambda part=memory: self._connection.recv_into(part))
            if count == 0:
                raise ChannelError(f"{self._peer} closed the connection during a weight sync")
            memory = memory[count:]

    def _within_deadline(self, transfer: Callable[[], int]) -> int:
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            return transfer()
        except TimeoutError as error:
            raise ChannelError(f"{self._peer} was too slow during a weight sync") from error
        except OSError as error:
            raise ChannelError(f"the connection to {self._peer} broke: {error}") from error


def connect(host: str, port: int, token: str) -> Stream:
    """A connection to a listener that knows the token too."""
    peer = f"the receiver at {host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        raise ChannelError(f"{peer} cannot be reached: {error}") from error
    stream = Stream(sends_at_once(connection), peer)
    try:
        stream.prove_and_check(key_of(token), first=True)
    except ChannelError:
        stream.close()
        raise
    return stream


def sends_at_once(connection: socket.socket) -> socket.socket:
    """Small frames, such as confirmations, do not wait for the answer to the frame before."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def key_of(token: str) -> bytes:
    if not token:
        raise ValueError("weights over TCP need a token that both sides know; it is empty")
    return token.encode()
