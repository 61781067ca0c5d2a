"""Weights that a rollout engine has to itself, because it cannot use those that are trained.

    trained weights                                     engine's own
      in this process, divided among ranks (FSDP)  --->   whole, or the rank's part of them in a
      in other processes, over TCP                 --->   tensor-parallel engine

Both ways bring whole tensors, all of them after every update. The copy knows which version it
holds, and what is generated is stamped with that one. From the first byte of an update until all
of it has arrived there is no version, and an engine that asks for it generates nothing. Here are
copies in this process; those in an engine's process are in `process_copy`.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.models.tensor_parallel import load_weights
from verl.utils.fs import copy_to_local
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.weight_sync import (
    Published,
    ReceivingChannel,
    WeightReceiver,
    WeightSender,
    WeightsNotReadyError,
    copy_weights,
    receive_weights,
)
from verl.workers.weight_sync.tcp import TcpListener


class RolloutCopy(ABC):
    """A rank's view of it: of an engine that several ranks share, perhaps only a helping hand."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights in use; raises when there are none to use."""

    @abstractmethod
    def withdraw(self) -> None:
        """Whatever is held is out of date, its number notwithstanding."""

    @abstractmethod
    def renew(self, trained: BaseEngine) -> None:
        """Bring the engine to the version that this process trains; nothing to do if it has it.

        All ranks renew together, since a whole tensor may be put together from all of them.
        """

    @abstractmethod
    def accept(self, token: str, host: str) -> tuple[str, int] | None:
        """Open a port at `host` for one update by a sender that knows the token.

        From now on nothing is generated until the update has come. None where this rank needs none.
        """

    @abstractmethod
    def receive(self, timeout_seconds: float) -> Published:
        """Take in the update that `accept` has opened a port for, proven by its fingerprint."""


class ModuleCopy(RolloutCopy):
    """The weights of `module` in this process.

    With `is_divided` the ranks of the engine divide the module, which must still be whole here.
    """

    def __init__(self, module: PreTrainedModel, *, bucket_bytes: int, is_divided: bool) -> None:
        self._module = module
        self._is_divided = is_divided
        weights = {name: weight.detach() for name, weight in module.named_parameters()}
        if is_divided:  # only what they look like: the whole tensors must not stay in memory
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

    def withdraw(self) -> None:
        self._version = None

    def renew(self, trained: BaseEngine) -> None:
        """Where the engine holds whole tensors, a fingerprint proves that they arrived."""
        version = trained.policy_version
        if version == self._version:
            return
        self.withdraw()
        weights = trained.get_per_tensor_param()
        if self._is_divided:
            load_weights(self._module, weights)
        else:
            self._receiver.forget()  # the trained version may be an earlier one
            copy_weights(self._sender, weights, version, self._receiver)
        self._version = version

    def accept(self, token: str, host: str) -> tuple[str, int]:
        self.withdraw()
        self._stop_listening()
        self._listener = TcpListener(token, host=host)
        return self._listener.host, self._listener.port

    def receive(self, timeout_seconds: float) -> Published:
        assert self._listener is not None, "accept comes first"
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
        if self._is_divided:
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
        """What buckets are written into: the engine's own tensors, or whole ones in host memory."""
        if not self._is_divided:
            return self._weights
        return {name: torch.empty_like(w, device="cpu") for name, w in self._weights.items()}


def load_copy(model: HFModelConfig, engine: FSDPEngineConfig, device: str) -> PreTrainedModel:
    """The policy's model as it is on disk, frozen."""
    built = load_causal_lm(
        copy_to_local(model.path),
        dtype=compute_dtype(engine.dtype, device),
        device=device,
        override_config=dict(model.override_config),
        trust_remote_code=model.trust_remote_code,
    )
    fuse_model(built)  # on a GPU; elsewhere it changes nothing
    return built.requires_grad_(False).eval()
