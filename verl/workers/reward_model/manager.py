"""`RewardModelManager`: a reward model of one's own, served over HTTP, for programs without a
trainer. A trainer serves the model that it has loaded anyway."""

from typing import Any

from verl.config.reward import FSDPRewardModelConfig
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.device import resolve_device
from verl.workers.reward_model.server import RewardModelServer
from verl.workers.roles.reward_model import RewardModelWorker


class RewardModelManager:
    """Loads the model that the section `reward_model` names, and serves it until `close`."""

    def __init__(self, config: FSDPRewardModelConfig, resource_pool: Any = None) -> None:
        worker = ClassWithInitArgs(RewardModelWorker, config, device=resolve_device("auto"))
        self.workers: Any = LocalWorkerGroup(resource_pool or ResourcePool([1]), worker)
        self.workers.init_model()
        self._server = RewardModelServer()
        self._server.score_texts = self.workers.workers[0].score_texts

    def get_router_address(self) -> str:
        """To be put between `http://` and `/classify`; a custom reward function gets it as
        `reward_router_address`."""
        return self._server.address

    def sleep(self) -> None:
        """Turn requests away until `wake_up`, so that others have the device for themselves."""
        self._server.is_asleep = True

    def wake_up(self) -> None:
        self._server.is_asleep = False

    def close(self) -> None:
        self._server.close()
