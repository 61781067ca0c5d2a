"""Weights that a rollout engine holds itself, because it cannot use those that are trained.

    trained weights                                     the engine's
      in this process, sharded over ranks (FSDP)   --->   whole, or the rank's shard of them in a
      in other processes, over TCP                 --->   tensor-parallel engine
      whole tensors, gathered by all ranks         --->   in a process of its own, sent by the rank
                                                          that leads it

Every way brings whole tensors, all of them after every update; only an engine that takes adapters
is sent the adapter alone. The holder knows its version, and what is generated is stamped with that
one. From the first byte of an update until all of it has arrived there is no version, and an engine
that asks for it generates nothing. `tensor_model_parallel_size` consecutive ranks may have an
engine process in common; the first of them starts it, sends to it and answers for it, and an engine
that is lost is restarted there.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config.engine import EngineConfig
from verl.config.model import HFModelConfig
from verl.models.expert_adapters import adapts_experts
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.models.lora import ADAPTER, CONFIG_FILE, is_adapter, peft_config
from verl.models.tensor_parallel import load_weights
from verl.utils.distributed import all_reduce_
from verl.utils.fs import copy_to_local
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.weight_sync import (
    Published,
    ReceivingChannel,
    WeightReceiver,
    WeightSender,
    WeightsNotReadyError,
    WeightSyncError,
    copy_weights,
    receive_weights,
    send_weights,
)
from verl.workers.weight_sync.tcp import TcpListener, TcpSender

ATTEMPTS = 3

logger = logging.getLogger(__name__)

Tensors = Callable[[], Iterator[tuple[str, Tensor]]]
"""What an update brings to an engine in a process of its own, where that is not every weight."""


class EngineWeights(ABC):
    """The weights of an engine as one of its ranks sees them; it may lead the engine or not."""

    seconds: Mapping[str, float] = MappingProxyType({})
    """What the phases of the last update took, where there are any."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights in use; raises while there are none."""

    @abstractmethod
    def invalidate(self) -> None:
        """Treat the weights as out of date, whatever their version number."""

    @abstractmethod
    def update(self, trained: BaseEngine, *, in_flight: bool = False) -> bool:
        """Bring the engine to the version that this process trains; False if all had it already.

        With `in_flight` requests may run; where the engine is in this process, the caller sees to
        it that no step is made meanwhile. All ranks call it together, since a whole tensor may be
        gathered from all of them.
        """

    @abstractmethod
    def accept(self, token: str, host: str, *, in_flight: bool = False) -> tuple[str, int] | None:
        """Open a port at `host` for one update by a sender that knows the token.

        From now on nothing is generated until the update has come (with `in_flight`: from
        `receive` on, and requests may run). None where this rank needs none.
        """

    @abstractmethod
    def receive(self, timeout_seconds: float) -> Published:
        """Take in the update that `accept` has opened a port for, proven by its fingerprint."""


class ModuleWeights(EngineWeights):
    """The weights of `module` in this process.

    With `is_sharded` the ranks of the engine shard the module, which must still be whole here.
    """

    def __init__(self, module: PreTrainedModel, *, bucket_bytes: int, is_sharded: bool) -> None:
        self._module = module
        self._is_sharded = is_sharded
        weights = {name: weight.detach() for name, weight in module.named_parameters()}
        if is_sharded:  # only what they look like: the whole tensors must not stay in memory
            weights = {name: weight.to("meta") for name, weight in weights.items()}
        self._weights = weights
        self._sender = WeightSender(bucket_bytes)
        self._listener: TcpListener | None = None
        self._version: int | None = None

    @property
    def version(self) -> int:
        if self._version is None:
            raise WeightsNotReadyError(
                "this rollout engine holds no complete version of the policy's weights and "
                "generates nothing: the first update has not come, or the last one was refused"
            )
        return self._version

    def invalidate(self) -> None:
        self._version = None

    def update(self, trained: BaseEngine, *, in_flight: bool = False) -> bool:
        """Where the engine holds whole tensors, a fingerprint proves that they arrived."""
        version = trained.policy_version
        if version == self._version:
            return False
        self.invalidate()
        weights = trained.get_per_tensor_param()
        if self._is_sharded:
            load_weights(self._module, weights)
        else:
            self._receiver.forget()  # the trained version may be an earlier one
            copy_weights(self._sender, weights, version, self._receiver)
        self._version = version
        return True

    def accept(self, token: str, host: str, *, in_flight: bool = False) -> tuple[str, int]:
        if not in_flight:
            self.invalidate()
        self._stop_listening()
        self._listener = TcpListener(token, host=host)
        return self._listener.host, self._listener.port

    def receive(self, timeout_seconds: float) -> Published:
        assert self._listener is not None, "accept comes first"
        self.invalidate()
        try:
            channel = self._listener.accept(
                max_bucket_bytes=self._sender.bucket_bytes, timeout_seconds=timeout_seconds
            )
            try:
                return self._receive(channel)
            finally:
                channel.close()
        finally:
            self._stop_listening()

    def _receive(self, channel: ReceivingChannel) -> Published:
        self._receiver.forget()  # a channel carries one update, so nothing older can come
        published = receive_weights(self._receiver, channel)
        if self._is_sharded:
            load_weights(self._module, self._targets.items())
        self._version = published.version
        return published

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @cached_property
    def _receiver(self) -> WeightReceiver:
        return WeightReceiver(self._targets)

    @cached_property
    def _targets(self) -> dict[str, Tensor]:
        """Where buckets are written: the engine's own tensors, or whole ones in host memory."""
        if not self._is_sharded:
            return self._weights
        return {name: torch.empty_like(w, device="cpu") for name, w in self._weights.items()}


def load_copy(model: HFModelConfig, engine: EngineConfig, device: str) -> PreTrainedModel:
    """The policy's model as it is on disk, frozen."""
    built = load_causal_lm(
        copy_to_local(model.path),
        dtype=compute_dtype(engine.dtype, device),
        device=device,
        override_config=model.hf_overrides(),
        trust_remote_code=model.trust_remote_code,
    )
    fuse_model(built)  # on a GPU; elsewhere it changes nothing
    return built.requires_grad_(False).eval()


class ProcessWeights(EngineWeights):
    """The weights of `process`, which is None on a rank that leads no engine.

    All ranks decide together whether there is anything to send, because those whose engine is up to
    date must still take part in gathering tensors. `tensors` are all weights, or an adapter's.
    """

    def __init__(self, process: EngineProcess | None, tensors: Tensors | None = None) -> None:
        self.process = process
        self._tensors = tensors
        self._is_invalid = False
        self._failure: Exception | None = None

    @property
    def version(self) -> int:
        if self.process is None:
            raise WeightsNotReadyError("another rank leads this engine; ask that one")
        return self.process.policy_version

    def invalidate(self) -> None:
        self._is_invalid = True

    def update(self, trained: BaseEngine, *, in_flight: bool = False) -> bool:
        version = trained.policy_version
        for attempt in range(ATTEMPTS + 1):
            is_behind = not self._holds(version)
            if not is_true_on_any_rank(is_behind):
                return attempt > 0
            if attempt == ATTEMPTS:
                break
            weights = self.sent_tensors(trained)
            try:
                if is_behind:
                    self.replace(weights, version, in_flight=in_flight)
            except (EngineLostError, WeightSyncError) as error:
                logger.warning("version %d did not reach the rollout engine: %s", version, error)
                self._failure = error
            finally:
                exhaust(weights)
        raise WeightSyncError(
            f"version {version} was sent {ATTEMPTS} times, and an engine still does not hold it; "
            "nothing is generated with anything else"
        ) from self._failure

    def sent_tensors(self, trained: BaseEngine) -> Iterator[tuple[str, Tensor]]:
        """What an update brings; all ranks must iterate over it."""
        return (self._tensors or trained.get_per_tensor_param)()

    def restore(self, kept: "KeptWeights") -> None:
        """Bring an engine that was lost to weights that were kept; other ranks need not call it."""
        for attempt in range(ATTEMPTS):
            if self._holds(kept.version):
                return
            try:
                self.replace(kept.weights.items(), kept.version)
            except (EngineLostError, WeightSyncError) as error:
                if attempt == ATTEMPTS - 1:
                    raise
                logger.warning(
                    "version %d did not reach the rollout engine: %s", kept.version, error
                )

    def replace(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, in_flight: bool = False
    ) -> None:
        """Send these weights, whatever the engine holds. Every rank must call it."""
        weights = iter(weights)
        try:
            if self.process is not None:
                start = time.perf_counter()
                self._prepare(self.process)
                awake = time.perf_counter()
                self.process.update_weights(weights, version, in_flight=in_flight)
                self._is_invalid = False
                load = self.process.load_seconds
                transfer = time.perf_counter() - awake - load
                self.seconds = {
                    "wake_up": awake - start,
                    "transfer": transfer,
                    "load": load,
                    "stall": self.process.stall_seconds,
                }
        finally:
            exhaust(weights)

    def accept(self, token: str, host: str, *, in_flight: bool = False) -> tuple[str, int] | None:
        if self.process is None:
            return None
        self._prepare(self.process)
        return self.process.accept_weights(token, host, in_flight=in_flight)

    def receive(self, timeout_seconds: float) -> Published:
        assert self.process is not None, "only a rank that accepts receives"
        published = self.process.receive_weights()
        self.seconds = {"stall": self.process.stall_seconds}
        return published

    def _holds(self, version: int) -> bool:
        """Whether this rank's engine is at the version; true if it leads none."""
        if self.process is None:
            return True
        try:
            is_current = self.process.policy_version == version
        except (EngineLostError, WeightsNotReadyError):
            return False
        return is_current and not self._is_invalid

    def _prepare(self, process: EngineProcess) -> None:
        """See that the process is alive and has memory for weights."""
        if process.is_alive():
            process.wake_up()
        else:
            logger.warning("the rollout engine's process is gone; starting it again")
            process.restart()


@dataclass(frozen=True)
class KeptWeights:
    """A version of the policy in host memory."""

    version: int
    weights: dict[str, Tensor]


def on_host(weight: Tensor) -> Tensor:
    """A copy that nobody trains."""
    return torch.empty_like(weight, device="cpu").copy_(weight.detach())


def send_to_ports(
    sender: WeightSender,
    weights: Iterator[tuple[str, Tensor]],
    version: int,
    addresses: Sequence[tuple[str, int]],
    token: str,
    *,
    timeout_seconds: float,
) -> Published | None:
    """Send weights to the ports that `accept` has opened; what they hold afterwards.

    None from a rank that has no port to serve: it takes part in gathering tensors.
    """
    try:
        if not addresses:
            return None
        channel = TcpSender(addresses, token, timeout_seconds=timeout_seconds)
        try:
            return send_weights(sender, weights, version, channel)
        finally:
            channel.close()
    finally:
        exhaust(weights)


def is_true_on_any_rank(here: bool) -> bool:
    """Whether it holds on any rank; every rank must call it."""
    return bool(all_reduce_(torch.tensor(int(here)), dist.ReduceOp.MAX))


def exhaust(weights: Iterable[object]) -> None:
    """Iterate over the rest: the other ranks wait for this one's shard of every tensor."""
    for _ in weights:
        pass


def adapter_config(module: PreTrainedModel) -> dict[str, Any]:
    """The content of peft's `adapter_config.json`, for an engine that is sent the adapter alone."""
    if adapts_experts(module):
        raise ValueError(
            "target_modules names experts, and rollout engines take adapters of linear layers "
            "alone: set model.lora.merge=True, which sends merged weights"
        )
    with TemporaryDirectory() as folder:
        peft_config(module).save_pretrained(folder)
        return json.loads((Path(folder) / CONFIG_FILE).read_text())


@torch.no_grad()
def adapter_tensors(
    module: PreTrainedModel, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The adapter under training, whole; all ranks that shard it must iterate over it."""
    for name, weight in module.named_parameters():
        if is_adapter(name) and f".{ADAPTER}." in name:  # else a frozen one, or a base weight
            weight = weight.detach().to(device, dtype)
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight
