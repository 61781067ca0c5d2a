"""One engine behind the names that recipes know: a replica, its server, a rollout in the trainer.

A replica either stands for an engine that workers hold (`init_hybrid`) or starts one of its own in
a process of its own, on the weights that are on disk (`init_standalone`). Its `server_handle` takes
token ids and gives token ids. HTTP is `verl.server`'s.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

from verl.config.model import HFModelConfig
from verl.config.roles import ROLLOUTS
from verl.config.rollout import RolloutConfig
from verl.utils.device import get_device_name
from verl.utils.fs import copy_to_local
from verl.utils.registry import Registry
from verl.workers.engine.spec import compute_dtype
from verl.workers.roles.actor_rollout_ref import GeneratingWorker
from verl.workers.rollout.base import (
    BaseRollout,
    GenerationRequest,
    Rollout,
    SamplingParams,
    TokenOutput,
)
from verl.workers.rollout.factory import engine_spec, has_own_process, ranks_per_engine
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.rollout.remote import remote_rollouts
from verl.workers.weight_sync import Published

__all__ = [
    "EngineProcessRollout",
    "RolloutMode",
    "RolloutReplica",
    "RolloutReplicaRegistry",
    "ServerHandle",
    "TokenOutput",
    "engines_of",
    "get_rollout_replica_class",
]


class RolloutMode(Enum):
    """Which devices an engine uses, and which weights."""

    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


def engines_of(worker_group: Any, rollout: RolloutConfig) -> list[Rollout]:
    """The engines of a group: the object itself if it is in this process, else a stand-in."""
    worker = worker_group.workers[0]
    if isinstance(worker, GeneratingWorker):
        return [worker.rollout]
    size, leads = ranks_per_engine(rollout), has_own_process(rollout.name)
    return [*remote_rollouts(worker_group, size, first_rank_leads=leads)]


def started_process(
    config: RolloutConfig, model_config: HFModelConfig, *, has_weights: bool
) -> EngineProcess:
    """The engine that `config.name` asks for, on this machine."""
    device = get_device_name()
    spec = engine_spec(
        config,
        copy_to_local(model_config.path),
        device=device,
        has_weights=has_weights,
        dtype=str(compute_dtype("auto", device)).removeprefix("torch."),
        trust_remote_code=model_config.trust_remote_code,
        tokenizer_path=model_config.tokenizer_path,
    )
    process = EngineProcess(spec)
    process.start()
    return process


class ServerHandle:
    """An engine as agent loops of recipes call it."""

    def __init__(self, rollout: Rollout, config: RolloutConfig) -> None:
        self.rollout = rollout
        self._config = config
        self._running: set[str] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str | None = None,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt once; `logprobs` is accepted, they always come back."""
        if image_data or video_data:
            raise ValueError("images and videos need an engine that reads them; this one does not")
        stated = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        if "max_new_tokens" in stated:
            stated["max_tokens"] = stated.pop("max_new_tokens")
        max_new_tokens = self._config.prompt_length + self._config.response_length - len(prompt_ids)
        stated["max_tokens"] = min(stated.get("max_tokens") or max_new_tokens, max_new_tokens)
        name = request_id or uuid.uuid4().hex
        request = GenerationRequest(
            request_id=name, prompt_ids=tuple(prompt_ids), params=SamplingParams(**stated)
        )
        self._running.add(name)
        try:
            (output,) = await self.rollout.generate(request)
        finally:
            self._running.discard(name)
        return output

    def abort_all(self) -> None:
        for name in tuple(self._running):
            self.rollout.abort(name)


class RolloutReplica:
    """Engine number `replica_rank` of a run."""

    mode: RolloutMode | None = None
    _server: ServerHandle | None = None

    def __init__(
        self,
        replica_rank: int,
        config: RolloutConfig,
        model_config: HFModelConfig,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
    ) -> None:
        if is_reward_model:
            raise ValueError(
                "is_reward_model is True; reward models are served by "
                "verl.workers.roles.RewardModelWorker (reward_model.enable=True)"
            )
        self.replica_rank = replica_rank
        self.config = config
        self.model_config = model_config
        self.gpus_per_node = gpus_per_node

    async def init_hybrid(self, worker_group: Any) -> None:
        """Stand for an engine of the group, which has the weights that are trained."""
        engines = engines_of(worker_group, self.config)
        if self.replica_rank >= len(engines):
            raise ValueError(
                f"replica_rank is {self.replica_rank}, and the group has {len(engines)} engines; "
                "they are numbered from 0"
            )
        self.mode = RolloutMode.HYBRID
        self._server = ServerHandle(engines[self.replica_rank], self.config)

    async def init_standalone(self) -> None:
        """Start an engine of its own, which has the weights that are on disk."""
        process = await asyncio.to_thread(
            started_process, self.config, self.model_config, has_weights=True
        )
        self.mode = RolloutMode.STANDALONE
        self._server = ServerHandle(process, self.config)

    @property
    def server_handle(self) -> ServerHandle:
        if self._server is None:
            raise RuntimeError(
                "this replica has no engine yet; await init_hybrid(worker_group) or "
                "init_standalone() first"
            )
        return self._server

    async def sleep(self) -> None:
        await asyncio.to_thread(self.server_handle.rollout.sleep)

    async def wake_up(self) -> None:
        await asyncio.to_thread(self.server_handle.rollout.wake_up)

    async def clear_kv_cache(self) -> None:
        """Forget what is kept of earlier requests; nothing may be running."""
        await self.sleep()
        await self.wake_up()

    async def abort_all_requests(self) -> None:
        """End what was asked through this replica; it ends with what it has."""
        self.server_handle.abort_all()

    def close(self) -> None:
        """End an engine of its own."""
        if self.mode is RolloutMode.STANDALONE:
            self.server_handle.rollout.close()


class RolloutReplicaRegistry:
    """From `rollout.name` to the class of its replicas; all built-in engines have the same."""

    _loaders: ClassVar[Registry[Callable[[], type[RolloutReplica]]]] = Registry(
        "rollout replica",
        **{name: lambda: RolloutReplica for name in ROLLOUTS},
    )

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """`loader` is called when the class is first needed."""
        cls._loaders.register(name)(loader)

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        return cls._loaders[name]()


def get_rollout_replica_class(rollout: str) -> type[RolloutReplica]:
    return RolloutReplicaRegistry.get(rollout)


class EngineProcessRollout(BaseRollout):
    """An engine in a process of its own, which `update_weights` brings to the trainer's weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None) -> None:
        super().__init__(config, model_config, device_mesh)
        self.process: EngineProcess | None = None
        self._num_updates = 0

    async def resume(self, tags: Sequence[str]) -> None:
        """Start the engine, or let it take its memory again."""
        if self.process is None:
            self.process = await asyncio.to_thread(
                started_process, self.config, self.model_config, has_weights=False
            )
        await asyncio.to_thread(self.process.wake_up)

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], **kwargs: Any
    ) -> Published:
        """All weights under their Hugging Face names; `version` counts up unless it is given."""
        await self.resume(["weights"])
        assert self.process is not None
        self._num_updates += 1
        version = kwargs.get("version", self._num_updates)
        return await asyncio.to_thread(self.process.update_weights, weights, version)

    async def release(self) -> None:
        """Give back the memory that only generation needs."""
        if self.process is not None:
            await asyncio.to_thread(self.process.sleep)
