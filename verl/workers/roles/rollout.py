"""The rollout's worker where generation has ranks of its own, apart from training.

    trainer                rollout ranks (here)                    actor ranks
      accept_weights  -->    listen, tell where, serve nothing
      receive_weights -->    take one update in               <--    send_weights
                             compare fingerprints, serve

Each rank holds the policy, or with `tensor_model_parallel_size` its part of it, in the built-in
engine. It generates only with weights that arrived whole and carry the actor's version.
"""

from verl.config.actor import FSDPActorConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.roles.generating import ROLLOUT_MESH, GeneratingWorker
from verl.workers.roles.rollout_copy import RolloutCopy, load_copy
from verl.workers.weight_sync import Published
from verl.workers.weight_sync.tcp import TcpListener


class RolloutWorker(GeneratingWorker):
    """One rank that generates; `config` is the whole section of the policy."""

    _listener: TcpListener | None = None

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
        engine_size = config.rollout.tensor_model_parallel_size
        self.take_part_in(ROLLOUT_MESH, ranks_per_sequence=engine_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; it generates nothing before the actor's weights have come."""
        config, tp_size = self.config, self.config.rollout.tensor_model_parallel_size
        assert isinstance(config.actor, FSDPActorConfig)
        self.join_ranks(timeout_seconds=config.nccl_timeout)
        self.tokenizer = hf_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
        )
        module = load_copy(config.model, config.actor.fsdp_config, self.device)
        copy = RolloutCopy(module, bucket_bytes=self.bucket_bytes, is_divided=tp_size > 1)
        self.start_rollout(module, lambda: copy.version, self.neighbours(tp_size))
        self.rollout_copy = copy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def accept_weights(self, token: str) -> tuple[str, int]:
        """Open a port for one update, where a sender that knows the token finds it.

        From now on nothing is generated until the update has come.
        """
        self.rollout_copy.withdraw()
        self._stop_listening()
        address, _ = self.get_available_master_addr_port()
        self._listener = TcpListener(token, host=address)
        return self._listener.host, self._listener.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self) -> Published:
        """Take the update in; what this rank holds then."""
        assert self._listener is not None, "accept_weights comes first"
        try:
            channel = self._listener.accept(
                max_bucket_bytes=self.bucket_bytes, timeout_seconds=self.config.nccl_timeout
            )
            try:
                return self.rollout_copy.receive(self.rollout, channel)
            finally:
                channel.close()
        finally:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
