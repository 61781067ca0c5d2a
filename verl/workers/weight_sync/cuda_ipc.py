"""Weights between processes of one machine that see the same GPU: they never leave it.

A bucket's bytes are copied into memory of the sender's that the receivers open too. The header and
a ticket, which says where that memory is, travel through shared memory as other buckets do; what
torch needs to open it are numbers and opaque bytes, so the ticket is JSON. Devices go by their
hardware identity, since each process numbers those that it sees.
"""

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from verl.workers.weight_sync.bucket import Bucket, ChannelError, Published, empty_payload
from verl.workers.weight_sync.channel import ReceivingChannel, SendingChannel
from verl.workers.weight_sync.shared_memory import (
    DEFAULT_TIMEOUT_SECONDS,
    SharedMemoryReceiver,
    SharedMemorySender,
)


class CudaIpcSender(SendingChannel):
    """Over one pipe to each receiver, as `SharedMemorySender`."""

    def __init__(
        self,
        pipes: "Sequence[Connection[Any, Any]]",
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._frames = SharedMemorySender(pipes, timeout_seconds=timeout_seconds)
        self._memory = empty_payload(0)
        self._ticket = b""

    def send(self, bucket: Bucket) -> None:
        self._frames.await_free()
        payload = bucket.payload
        if len(self._memory) < len(payload) or self._memory.device != payload.device:
            self._memory = empty_payload(0)  # before the larger one is taken
            self._memory = empty_payload(len(payload), payload.device)
            self._ticket = ticket_for(self._memory)
        self._memory[: len(payload)].copy_(payload)
        torch.cuda.synchronize(payload.device)  # the receivers' streams know nothing of ours
        ticket = torch.frombuffer(bytearray(self._ticket), dtype=torch.uint8)
        self._frames.send_frame(frame_head(bucket), ticket)

    def confirmations(self) -> list[Published | None]:
        answers = self._frames.confirmations()
        self._memory, self._ticket = empty_payload(0), b""
        return answers


class CudaIpcReceiver(ReceivingChannel):
    """The other end of one of the sender's pipes."""

    def __init__(
        self,
        pipe: "Connection[Any, Any]",
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._frames = SharedMemoryReceiver(pipe, timeout_seconds=timeout_seconds)
        self._memory = empty_payload(0)
        self._ticket = b""

    def receive(self) -> Bucket:
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)  # asking says that the last one is done
        head, content = self._frames.receive_frame()
        ticket = content.numpy().tobytes()
        header, num_bytes = split_head(head)
        if ticket != self._ticket:
            self._memory = empty_payload(0)  # lets go of the last one
            self._memory, self._ticket = opened(ticket), ticket
        return Bucket.from_wire(header, self._memory[:num_bytes])

    def confirm(self, held: Published | None) -> None:
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)
        self._memory, self._ticket = empty_payload(0), b""
        self._frames.confirm(held)


def frame_head(bucket: Bucket) -> bytes:
    """The bucket's header behind the number of its bytes."""
    return len(bucket.payload).to_bytes(8, "big") + bucket.header()


def split_head(head: bytes) -> tuple[bytes, int]:
    return head[8:], int.from_bytes(head[:8], "big")


def ticket_for(memory: Tensor) -> bytes:
    """What another process needs to open this memory."""
    _, *parts = memory.untyped_storage()._share_cuda_()
    return encode_ticket(device_identity(memory.device.index), parts)


def opened(ticket: bytes) -> Tensor:
    """The memory that `ticket` is for, as bytes."""
    identity, parts = decode_ticket(ticket)
    visible = [device_identity(index) for index in range(torch.cuda.device_count())]
    if identity not in visible:
        raise ChannelError(
            f"the weights are on GPU {identity}, which this process does not see (it sees "
            f"{', '.join(visible) or 'none'}); give both the same CUDA_VISIBLE_DEVICES"
        )
    index = visible.index(identity)
    storage: Any = torch.UntypedStorage._new_shared_cuda(index, *parts)
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def encode_ticket(identity: str, parts: Sequence[Any]) -> bytes:
    """Handles are bytes, sizes and flags numbers; bytes become text with a mark before it."""
    fields = [f"x{part.hex()}" if isinstance(part, bytes) else part for part in parts]
    return json.dumps([identity, fields]).encode()


def decode_ticket(ticket: bytes) -> tuple[str, list[Any]]:
    try:
        identity, fields = json.loads(ticket)
        return str(identity), [_part(field) for field in fields]
    except (ValueError, TypeError) as error:
        raise ChannelError(f"the ticket for a GPU's memory cannot be read: {error!r}") from error


def device_identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _part(field: Any) -> Any:
    if isinstance(field, str):
        return bytes.fromhex(field.removeprefix("x"))
    if not isinstance(field, int):
        raise ValueError(f"{field!r} is neither a number nor a handle")
    return field
