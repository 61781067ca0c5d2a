"""The devices of several ranks, by the names that another process must be given to use them."""

import socket
from typing import Any

import torch.distributed as dist

from verl.utils.device import get_device_id, get_visible_devices_keyword
from verl.utils.environment import variable


def devices_of_ranks(group: dist.ProcessGroup | None, device: str) -> tuple[str, ...]:
    """Of all ranks of the group, or of this rank alone; none on a CPU. All ranks must ask."""
    if device == "cpu":
        return ()
    own = own_device()
    if group is None:
        return (own,)
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    machines = sorted({machine for machine, _ in places})
    if len(machines) > 1:
        raise ValueError(
            f"an engine has the devices of {len(places)} ranks, and these are on "
            f"{', '.join(machines)}; an engine in a process of its own has devices of one machine: "
            "choose rollout.tensor_model_parallel_size (times pipeline_model_parallel_size) so "
            "that it divides the devices of a machine"
        )
    return tuple(name for _, name in places)


def own_device() -> str:
    """As the variable that hides devices names it: a number, or an identifier."""
    shown = variable(get_visible_devices_keyword())
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return names[get_device_id()] if names else str(get_device_id())
