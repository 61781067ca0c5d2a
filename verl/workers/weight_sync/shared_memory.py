"""Weights between processes of one machine: buckets in memory both see, short notes over pipes.

    sender                                     receiver
    copy into the file, note it -------------> map the file
    remove the file's name      <--- open ---  apply
    copy the next one in        <--- free ---  (or the confirmation, after the last)

The file lives in /dev/shm and loses its name as soon as all receivers have it open, so nothing is
left behind, whoever dies. Its space is reserved before anything is written: a full /dev/shm is an
error with a name, not a bus error in the middle of a copy. Notes are short enough for a pipe to
hold, so sending them never waits; answers have a deadline.
"""

import errno
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import (
    Bucket,
    ChannelError,
    NoRoomError,
    Published,
    empty_payload,
)
from verl.workers.weight_sync.channel import (
    ReceivingChannel,
    SendingChannel,
    format_confirmation,
    parse_confirmation,
)

SHARED_FOLDER = "/dev/shm"
DEFAULT_TIMEOUT_SECONDS = 600.0
MAX_NOTE_BYTES = 4096
MAX_HEADER_BYTES = 2**20
"""Headers differ in length; with this much to spare one file serves all buckets."""

_OPEN, _FREE = b"open", b"free"
_NUMBER = 8  # bytes


class SharedMemorySender(SendingChannel):
    """Over one pipe (an end of `multiprocessing.Pipe()`) to each receiver."""

    def __init__(
        self,
        pipes: "Sequence[Connection[Any, Any]]",
        *,
        folder: str = SHARED_FOLDER,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._pipes = list(pipes)
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._memory = empty_payload(0)
        self._is_in_use = False

    def send(self, bucket: Bucket) -> None:
        self.send_frame(bucket.header(), bucket.payload)

    def send_frame(self, head: bytes, payload: Tensor) -> None:
        """Hand two runs of bytes to every receiver, which must have let go of the last ones."""
        self.await_free()
        header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        num_bytes = len(header) + len(payload)
        if num_bytes <= len(self._memory):
            self._fill(header, payload)
            self._note(header, payload, "")
            return
        self._memory = empty_payload(0)  # before the larger one is taken
        path = reserve_file(self._folder, num_bytes + MAX_HEADER_BYTES)
        try:
            self._memory = map_file(path)
            self._fill(header, payload)
            self._note(header, payload, str(path))
            self._await_all(_OPEN)
        finally:
            path.unlink()

    def await_free(self) -> None:
        """Wait until all receivers have let go of the last frame."""
        if self._is_in_use:
            self._await_all(_FREE)
            self._is_in_use = False

    def confirmations(self) -> list[Published | None]:
        answers = [self._answer(index) for index in range(len(self._pipes))]
        self._is_in_use = False
        return [parse_confirmation(answer) for answer in answers]

    def _fill(self, header: Tensor, payload: Tensor) -> None:
        end = len(header) + len(payload)
        self._memory[: len(header)].copy_(header)
        self._memory[len(header) : end].copy_(payload)

    def _note(self, header: Tensor, payload: Tensor, path: str) -> None:
        sizes = len(header).to_bytes(_NUMBER, "big") + len(payload).to_bytes(_NUMBER, "big")
        self._is_in_use = True
        for index, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(sizes + path.encode())
            except OSError as error:
                raise ChannelError(f"receiver {index} is gone ({error}); start it again") from error

    def _await_all(self, word: bytes) -> None:
        for index in range(len(self._pipes)):
            answer = self._answer(index)
            if answer != word:
                raise ChannelError(f"receiver {index} sent {answer[:20]!r} instead of {word!r}")

    def _answer(self, index: int) -> bytes:
        return read_note(self._pipes[index], f"receiver {index}", self._timeout_seconds)


class SharedMemoryReceiver(ReceivingChannel):
    """The other end of one of the sender's pipes."""

    def __init__(
        self,
        pipe: "Connection[Any, Any]",
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._pipe = pipe
        self._timeout_seconds = timeout_seconds
        self._memory = empty_payload(0)
        self._is_in_use = False

    def receive(self) -> Bucket:
        return Bucket.from_wire(*self.receive_frame())

    def receive_frame(self) -> tuple[bytes, Tensor]:
        """The next two runs of bytes; their memory is free again when the next are asked for."""
        if self._is_in_use:
            self._say(_FREE)
        note = read_note(self._pipe, "the sender", self._timeout_seconds)
        num_header_bytes = int.from_bytes(note[:_NUMBER], "big")
        end = num_header_bytes + int.from_bytes(note[_NUMBER : 2 * _NUMBER], "big")
        path = note[2 * _NUMBER :].decode()
        if path:
            self._memory = empty_payload(0)  # before the larger one is taken
            self._memory = map_file(Path(path))
            self._say(_OPEN)
        self._is_in_use = True
        header = self._memory[:num_header_bytes].numpy().tobytes()
        return header, self._memory[num_header_bytes:end]

    def confirm(self, held: Published | None) -> None:
        self._is_in_use = False
        self._say(format_confirmation(held))

    def _say(self, answer: bytes) -> None:
        try:
            self._pipe.send_bytes(answer)
        except OSError as error:
            raise ChannelError(f"the sender is gone ({error}) during a weight sync") from error


def reserve_file(folder: str, num_bytes: int) -> Path:
    """A new file that only this user may read, with memory behind all of it."""
    handle, name = tempfile.mkstemp(prefix="verl-weights-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        Path(name).unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoomError(
            f"{folder} has no room for a bucket of {num_bytes} bytes; give the container more "
            "shared memory (--shm-size), or lower "
            "rollout.checkpoint_engine.update_weights_bucket_megabytes"
        ) from error
    finally:
        os.close(handle)
    return Path(name)


def map_file(path: Path) -> Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def read_note(pipe: "Connection[Any, Any]", peer: str, timeout_seconds: float) -> bytes:
    try:
        if not pipe.poll(timeout_seconds):
            raise ChannelError(f"{peer} was silent for {timeout_seconds:g} s during a weight sync")
        return pipe.recv_bytes(MAX_NOTE_BYTES)
    except (EOFError, OSError) as error:
        raise ChannelError(f"{peer} closed the pipe during a weight sync") from error
