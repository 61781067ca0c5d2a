"""A copy of the policy for a rollout engine that cannot use the weights that are trained.

    trained weights                                     engine's own
      in this process, divided among ranks (FSDP)  --->   whole, or the rank's part of them in a
      in other processes, through a channel        --->   tensor-parallel engine

Both ways bring whole tensors, all of them after every update. The copy knows which version it
holds, and what is generated is stamped with that one. From the first byte of an update until all
of it has arrived there is no version, and an engine that asks for it generates nothing.
"""

from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.utils.fs import copy_to_local
from verl.workers.engine.base import BaseEngine
from verl.workers.roles.building import compute_dtype
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.weight_sync import (
    Published,
    ReceivingChannel,
    WeightReceiver,
    WeightSender,
    WeightsNotReadyError,
    copy_weights,
    receive_weights,
)


class RolloutCopy:
    """The weights of `module`, which an engine has to itself.

    With `is_divided` the ranks of the engine divide the module, which must still be whole here.
    """

    def __init__(self, module: PreTrainedModel, *, bucket_bytes: int, is_divided: bool) -> None:
        self._is_divided = is_divided
        weights = {name: weight.detach() for name, weight in module.named_parameters()}
        if is_divided:  # only what they look like: the whole tensors must not stay in memory
            weights = {name: weight.to("meta") for name, weight in weights.items()}
        self._weights = weights
        self._sender = WeightSender(bucket_bytes)
        self._version: int | None = None

    @property
    def version(self) -> int:
        """Of the weights in use; raises when there are none to use."""
        if self._version is None:
            raise WeightsNotReadyError(
                "this rollout engine holds no complete version of the policy's weights and "
                "generates nothing: the first update has not come, or the last one was refused"
            )
        return self._version

    def withdraw(self) -> None:
        """Generate nothing until the next update has arrived."""
        self._version = None

    def renew(self, rollout: NativeEngine, trained: BaseEngine) -> None:
        """Bring the engine to the version that this process trains; nothing to do if it has it.

        All ranks renew together, since a whole tensor may be put together from all of them. Where
        the engine holds whole tensors, a fingerprint proves that they arrived.
        """
        version = trained.policy_version
        if version == self._version:
            return
        self.withdraw()
        weights = trained.get_per_tensor_param()
        if self._is_divided:
            rollout.update_weights(weights)
        else:
            copy_weights(self._sender, weights, version, self._receiver)
        self._version = version

    def receive(self, rollout: NativeEngine, channel: ReceivingChannel) -> Published:
        """Take in what another process sends, proven by its fingerprint."""
        self.withdraw()
        self._receiver.forget()  # a channel carries one update, so nothing older can come
        published = receive_weights(self._receiver, channel)
        if self._is_divided:
            rollout.update_weights(self._targets.items())
        self._version = published.version
        return published

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
