"""`RemoteRewardManager`: the reward function in `reward_model.num_workers` processes.

They run beside the trainer on its machine; where the program is attached to a Ray cluster, they are
actors of the cluster. An async function gets an event loop in each.
"""

from typing import Any

from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.ray_pool import RayWorkerPool, is_attached


class RemoteRewardManager(PrimeRewardManager):
    """`prime`, with the number of processes from the configuration."""

    @classmethod
    def options_of(cls, config: Any) -> dict[str, Any]:
        section = config["reward_model"]
        options: dict[str, Any] = {"make_pool": RayWorkerPool} if is_attached() else {}
        if "num_workers" in section:
            options["num_workers"] = section["num_workers"]
        return options
