"""Weights over a torch process group: gloo between CPUs, NCCL or HCCL between accelerators.

One rank sends and all others receive; every rank of the group must take part in every update.
Waits end with the group's own time limit, set where the group is made.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.distributed import Group, collective_device
from verl.workers.weight_sync.bucket import Bucket, Published, empty_payload
from verl.workers.weight_sync.channel import ReceivingChannel, SendingChannel

_SIGN = 2**63


class BroadcastSender(SendingChannel):
    """This rank's weights, to all other ranks of the group."""

    def __init__(self, group: Group = None) -> None:
        self._group = group
        self._rank = dist.get_rank()

    def send(self, bucket: Bucket) -> None:
        device = collective_device(self._group)
        header = torch.frombuffer(bytearray(bucket.header()), dtype=torch.uint8)
        sizes = torch.tensor([len(header), len(bucket.payload)])
        for part in (sizes, header, bucket.payload):
            dist.broadcast(part.to(device), src=self._rank, group=self._group)

    def confirmations(self) -> list[Published | None]:
        own = dist.get_group_rank(_group_or_world(self._group), self._rank)
        answers = _exchange(None, self._group)
        return [answer for rank, answer in enumerate(answers) if rank != own]


class BroadcastReceiver(ReceivingChannel):
    """What global rank `source` sends to this rank's group."""

    def __init__(self, source: int, group: Group = None) -> None:
        self._source = source
        self._group = group
        self._memory = empty_payload(0)

    def receive(self) -> Bucket:
        device = collective_device(self._group)
        sizes = self._take(torch.zeros(2, dtype=torch.long, device=device))
        num_header_bytes, num_bytes = sizes.tolist()
        header = self._take(empty_payload(num_header_bytes, device))
        if len(self._memory) < num_bytes:
            self._memory = empty_payload(0)  # before the larger one is taken
            self._memory = empty_payload(num_bytes, device)
        payload = self._take(self._memory[:num_bytes])
        return Bucket.from_wire(header.cpu().numpy().tobytes(), payload)

    def confirm(self, held: Published | None) -> None:
        _exchange(held, self._group)

    def _take(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=self._source, group=self._group)
        return tensor


def _exchange(held: Published | None, group: Group) -> list[Published | None]:
    """Everybody's answer, in the order of the group's ranks."""
    known, version, fingerprint = (0, 0, _SIGN) if held is None else (1, *held)
    own = torch.tensor([known, version, fingerprint - _SIGN], device=collective_device(group))
    answers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, own, group=group)
    rows = (answer.tolist() for answer in answers)
    return [Published(row[1], row[2] + _SIGN) if row[0] else None for row in rows]


def _group_or_world(group: Group) -> dist.ProcessGroup:
    world = dist.group.WORLD if group is None else group
    assert world is not None
    return world
