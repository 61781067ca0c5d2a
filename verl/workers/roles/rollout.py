"""The rollout's worker where generation has ranks of its own, apart from training.

    trainer                rollout ranks (here)                    actor ranks
      accept_weights  -->    listen, tell where, serve nothing
      receive_weights -->    take one update in               <--    send_weights
                             compare fingerprints, serve

Each rank holds the policy, or with `tensor_model_parallel_size` its part of it. An engine in a
process of its own listens there: the weights go straight to it, past the rank that leads it. It
generates only with weights that arrived whole and carry the actor's version.
"""

from collections.abc import Sequence

from verl.config.ppo import ActorRolloutRefConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.roles.generating import ROLLOUT_MESH, GeneratingWorker
from verl.workers.rollout.factory import ranks_per_engine
from verl.workers.weight_sync import Published


class RolloutWorker(GeneratingWorker):
    """One rank that generates; `config` is the whole section of the policy."""

    _expects_weights = False

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: str | None = None,
        total_training_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.device = device or get_device_name()
        self.take_part_in(ROLLOUT_MESH, ranks_per_sequence=ranks_per_engine(config.rollout))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engine; it generates nothing before the actor's weights have come."""
        self.join_ranks(timeout_seconds=self.config.nccl_timeout)
        self.load_tokenizer()
        self.start_on_copy()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_weights(
        self, token: str, ranks: Sequence[int] | None = None
    ) -> tuple[str, int] | None:
        """Open a port for one update, where a sender that knows the token finds it.

        From now on nothing is generated until the update has come. None from a rank that gets no
        weights: it is not among `ranks`, or another one leads its engine.
        """
        self._expects_weights = False
        if ranks is not None and self.rank not in ranks:
            return None
        assert self.rollout_copy is not None
        host, _ = self.get_available_master_addr_port()
        address = self.rollout_copy.accept(token, host)
        self._expects_weights = address is not None
        return address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self) -> Published | None:
        """Take in the update for which a port is open; what this rank's engine holds then."""
        if not self._expects_weights:
            return None
        self._expects_weights = False
        assert self.rollout_copy is not None
        return self.rollout_copy.receive(self.config.nccl_timeout)
