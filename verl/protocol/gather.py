"""Every rank's rows on every rank.

Batches travel as bytes in the format of `save_to_disk` (so their columns must hold plain data), and
therefore the sizes go first. A rank that cannot send says so in place of its size: all ranks then
raise, and none waits for it. The deadline of the two collectives is that of the process group.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.storage import Fields, dump_fields, parse_fields

_CANNOT_SEND = -1


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Replace the rows of `data` by those of all ranks, in rank order; `meta_info` stays."""
    device = _communication_device(process_group)
    octets, refusal = _dump_rows(data)
    size = len(octets) if refusal is None else _CANNOT_SEND
    sizes = [
        int(s) for s in torch.cat(_all_gather(torch.tensor([size], device=device), process_group))
    ]
    if refusal is not None:
        try:
            raise refusal
        finally:
            del refusal  # an error that its own frame names would keep the process group alive
    if _CANNOT_SEND in sizes:
        ranks = [rank for rank, size in enumerate(sizes) if size == _CANNOT_SEND]
        raise ValueError(f"ranks {ranks} could not send their rows; the reason is in their logs")
    message = torch.zeros(max(sizes), dtype=torch.uint8)
    message[: len(octets)] = torch.tensor(np.frombuffer(octets, dtype=np.uint8))
    messages = _all_gather(message.to(device), process_group)
    parts = [
        DataProto(*parse_fields(received[:size].cpu().numpy().tobytes()))  # pyright: ignore[reportArgumentType]
        for received, size in zip(messages, sizes, strict=True)
    ]
    _replace_rows(data, DataProto.concat(parts))


def _communication_device(group: dist.ProcessGroup) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if "gloo" in dist.get_backend(group) or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _dump_rows(data: DataProto) -> tuple[bytes, ValueError | None]:
    try:
        return dump_fields(Fields(data.batch, data.non_tensor_batch, {})), None
    except ValueError as error:
        return b"", error


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _replace_rows(data: DataProto, whole: DataProto) -> None:
    if data.batch is not None:
        for column in data.batch.values():
            whole.to(column.device)  # the columns of a batch are on one device
            break
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch
