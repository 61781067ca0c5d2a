"""The checkpoint of one role, on one rank or on many.

    huggingface/                config, tokenizer; the weights too on one rank, or with `hf_model`
    model.rank_R_of_W.*         on several ranks: the weights that rank R holds
    optimizer.rank_R_of_W.*     the master weights and moments that rank R holds
    optimizer.json              schedule and counters, written by rank 0
    extra.rank_R_of_W.*         random state of rank R, and a schedule of its own if there is one
    lora_adapter/               of a role that trains adapters: the adapter as peft loads it

Every rank writes what it holds and waits for nobody. A run may continue on another number of ranks:
each then reads the elements that it now holds (see `pieces`). Saving is in two halves, `capture`
and the writes it returns, so that the second can run while training goes on. With adapters the base
weights do not change and are not saved: a run continues on the base model it names, and `hf_model`
in `save_contents` adds merged weights.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config.trainer import CheckpointConfig
from verl.models.lora import (
    ADAPTER_FOLDER,
    adapter_weights,
    has_lora,
    hf_weights,
    merged_copy,
    save_adapter,
)
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, Stateful, reseed_from
from verl.utils.checkpoint.hf_model import (
    ProcessingClass,
    load_hf_weights,
    own_weights,
    published_weights,
    save_hf_description,
    save_hf_model,
    write_hf_weights,
)
from verl.utils.checkpoint.layout import CheckpointMismatchError
from verl.utils.checkpoint.piece_files import (
    StoredTensor,
    differences,
    join_state,
    masters,
    pieces_to_write,
    rank_name,
    read_into,
    read_parts,
    saved_world_size,
    split_state,
    stored_hf_tensors,
    stored_masters,
    stored_tensors,
    write_pieces,
)
from verl.utils.checkpoint.pieces import Part
from verl.utils.checkpoint.tensor_store import encode_state, has_state, load_state, write_state

logger = logging.getLogger(__name__)

HF_FOLDER = "huggingface"
MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"

Write = Callable[[Path], None]
"""Puts something that was captured into the folder of the role."""

Keep = Callable[[str, Tensor], Tensor]
"""From a tensor that training will change to one that stays: itself, or a copy."""


class DividedModel(ABC):
    """An engine whose weights are not in the model that describes them, but divided otherwise."""

    @abstractmethod
    def weight_parts(self) -> dict[str, Part]:
        """Copies of this rank's share of every weight; every rank must ask."""

    @abstractmethod
    def load_weight_parts(self, parts: Mapping[str, Part]) -> None:
        """Take weights of which every rank has such a share."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, one at a time; every rank must ask."""


class FSDPCheckpointManager(BaseCheckpointManager):
    """Writes into, and reads from, a folder that the owner of the step commits and verifies."""

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Stateful | None,
        lr_scheduler: Stateful | None = None,
        processing_class: ProcessingClass | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        self.rank = rank
        self.world_size = world_size

    # ---- saving ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """`hdfs_path` and `max_ckpt_to_keep` concern whole steps, after they are committed."""
        refuse_what_concerns_steps(hdfs_path=hdfs_path, max_ckpt_to_keep=max_ckpt_to_keep)
        for write in self.capture(as_it_is):
            write(Path(local_path))

    def capture(self, keep: Keep) -> list[Write]:
        """All that `save_contents` names, as it is now. Every rank must call it: shards are
        gathered here."""
        writes = self.capture_weights(keep)
        if self.optimizer is not None and self.should_save_optimizer:
            tree, parts = split_state(self.optimizer.state_dict())
            writes.append(self._pieces(OPTIMIZER, parts, keep))
            if self.rank == 0:
                writes.append(partial(write_state, name=OPTIMIZER, state=encode_state(tree)))
        if self.should_save_extra:
            name = rank_name(EXTRA, self.rank, self.world_size)
            writes.append(partial(write_state, name=name, state=encode_state(self._extra_state())))
        return writes

    def capture_weights(self, keep: Keep) -> list[Write]:
        """The model's description and, as far as `save_contents` asks for them, its weights."""
        writes: list[Write] = [self.describe] if self.rank == 0 else []
        if self.should_save_model and self.world_size > 1:
            writes.append(self._pieces(MODEL, self.weight_parts(), keep))
        if self.should_save_hf_model or (self.should_save_model and self.world_size == 1):
            whole = self.whole_weights(self.own_weights(), keep)
            if self.rank == 0:
                writes.append(self.write_published(whole))
        return writes

    def weight_parts(self) -> Mapping[str, Part]:
        """What this rank holds of every weight."""
        return own_weights(self.model)

    def own_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Whole weights, or DTensors that can be put together."""
        return own_weights(self.model).items()

    def describe(self, folder: Path) -> None:
        save_hf_description(self.model, self.processing_class, folder / HF_FOLDER)

    def whole_weights(self, weights: Iterable[tuple[str, Tensor]], keep: Keep) -> dict[str, Tensor]:
        """Weights put together from all ranks, one at a time; only rank 0 keeps them."""
        kept: dict[str, Tensor] = {}
        for name, weight in weights:
            is_divided = isinstance(weight, DTensor)
            whole = weight.full_tensor() if is_divided else weight
            if self.rank == 0:
                kept[name] = whole.detach().cpu() if is_divided else keep(f"whole {name}", whole)
        return kept

    def write_published(self, weights: dict[str, Tensor]) -> Write:
        return lambda folder: write_hf_weights(
            folder / HF_FOLDER, published_weights(self.model, weights)
        )

    def _pieces(self, name: str, parts: Mapping[str, Part], keep: Keep) -> Write:
        held = pieces_to_write(parts, rank=self.rank, world_size=self.world_size)
        kept = [replace(item, tensor=keep(item.name, item.tensor)) for item in held]
        ranks = {"rank": self.rank, "world_size": self.world_size}
        return partial(write_pieces, name=name, held=kept, **ranks)

    def _extra_state(self) -> dict[str, Any]:
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {"lr_scheduler": schedule, "rng": self.get_rng_state()}

    # ---- loading ---------------------------------------------------------------------------------

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """The random state comes last, because loading itself may draw."""
        refuse_what_concerns_steps(
            hdfs_path=hdfs_path, del_local_after_load=del_local_after_load or None
        )
        folder = Path(local_path)
        self._refuse_missing(folder)
        if self.should_load_model:
            self.load_weights(folder)
        if self.optimizer is not None and self.should_load_optimizer:
            self._load_optimizer(folder, self.optimizer)
        if self.should_load_extra:
            self._load_extra(folder)

    def load_weights(self, folder: Path) -> None:
        """From this rank's pieces, else from the masters, whose rounded values the weights are,
        else from the published weights."""
        is_divided = saved_world_size(folder, MODEL) is not None
        if self.world_size == 1 and not is_divided:
            load_hf_weights(self.model, folder / HF_FOLDER)
            return
        stored, current = stored_tensors(folder, MODEL), own_weights(self.model)
        if not is_divided:
            fp32 = stored_masters(stored_tensors(folder, OPTIMIZER))
            either = {**stored_hf_tensors(folder / HF_FOLDER), **fp32}
            stored = {name: either[name] for name in current if name in either}
        self.copy_weights(folder, stored, current)

    @torch.no_grad()
    def copy_weights(
        self, folder: Path, stored: Mapping[str, StoredTensor], current: Mapping[str, Part]
    ) -> None:
        """Fill the model's own weights, in place."""
        wrong = list(differences(stored, current))
        if wrong:
            raise CheckpointMismatchError(folder, wrong[:8])
        for name, part in current.items():
            read_into(stored[name], part)

    def _load_optimizer(self, folder: Path, optimizer: Stateful) -> None:
        stored = stored_tensors(folder, OPTIMIZER)
        _, current = split_state(optimizer.state_dict())
        wrong = list(differences(stored_masters(stored), masters(current)))
        if wrong:
            raise CheckpointMismatchError(folder, wrong[:8])
        tree = load_state(folder, OPTIMIZER)
        optimizer.load_state_dict(join_state(tree, dict(read_parts(stored, current))))

    def _load_extra(self, folder: Path) -> None:
        saved = saved_world_size(folder, EXTRA)
        assert saved is not None, "_refuse_missing has looked"
        is_same = saved == self.world_size
        extra = load_state(folder, rank_name(EXTRA, self.rank if is_same else 0, saved))
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        if is_same:
            self.load_rng_state(extra["rng"])
            return
        reseed_from(extra["rng"], self.rank, self.world_size)
        logger.warning(
            "%s was saved on %d ranks and continues on %d; rank %d draws random numbers anew, from "
            "a seed made of the saved state and its rank",
            *(folder, saved, self.world_size, self.rank),
        )

    def _refuse_missing(self, folder: Path) -> None:
        present = {
            MODEL: self.has_weights(folder),
            OPTIMIZER: has_state(folder, OPTIMIZER),
            EXTRA: saved_world_size(folder, EXTRA) is not None,
        }
        wanted = self.checkpoint_config.load_contents
        missing = [name for name, is_there in present.items() if name in wanted and not is_there]
        if missing:
            held = ", ".join(name for name, is_there in present.items() if is_there) or "nothing"
            raise CheckpointMismatchError(
                folder,
                [f"it holds {held}; load_contents also asks for {', '.join(missing)}"],
            )

    def has_weights(self, folder: Path) -> bool:
        is_published = any((folder / HF_FOLDER).glob("*.safetensors"))
        return is_published or saved_world_size(folder, MODEL) is not None


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """For writes that are done before training goes on."""
    return tensor


def refuse_what_concerns_steps(**options: object) -> None:
    """A role writes one folder of a step; what happens to whole steps is their owner's affair."""
    ways_out = {
        "hdfs_path": "set trainer.default_hdfs_dir: a step is copied once it is committed",
        "max_ckpt_to_keep": "give it to CheckpointStore",
        "del_local_after_load": "a step is deleted after a newer one is committed: "
        "CheckpointStore(num_to_keep=1)",
    }
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, which one role of a step cannot do; {ways_out[name]}"
            )


def checkpoint_manager(
    model: PreTrainedModel,
    optimizer: Stateful | None,
    *,
    processing_class: ProcessingClass | None = None,
    checkpoint_config: CheckpointConfig,
    rank: int = 0,
    world_size: int = 1,
) -> FSDPCheckpointManager:
    """The manager that suits the model."""
    kind = AdapterCheckpointManager if has_lora(model) else FSDPCheckpointManager
    if isinstance(optimizer, DividedModel):
        kind = DividedCheckpointManager
    return kind(
        model,
        optimizer,
        processing_class=processing_class,
        checkpoint_config=checkpoint_config,
        rank=rank,
        world_size=world_size,
    )


class DividedCheckpointManager(FSDPCheckpointManager):
    """The same, of an engine that divides its weights in a way of its own."""

    @property
    def divided(self) -> DividedModel:
        assert isinstance(self.optimizer, DividedModel)
        return self.optimizer

    def weight_parts(self) -> Mapping[str, Part]:
        return self.divided.weight_parts()

    def own_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.divided.get_per_tensor_param()

    def load_weights(self, folder: Path) -> None:
        stored, current = stored_tensors(folder, MODEL), self.divided.weight_parts()
        if not stored:
            fp32 = stored_masters(stored_tensors(folder, OPTIMIZER))
            either = {**stored_hf_tensors(folder / HF_FOLDER), **fp32}
            stored = {name: either[name] for name in current if name in either}
        self.copy_weights(folder, stored, current)
        self.divided.load_weight_parts(current)


class AdapterCheckpointManager(FSDPCheckpointManager):
    """The same, with the adapter in place of the weights."""

    def capture_weights(self, keep: Keep) -> list[Write]:
        writes: list[Write] = [self.describe] if self.rank == 0 else []
        if self.should_save_model or self.should_save_hf_model:
            trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
            adapter = self.whole_weights(trained.items(), keep)
            if self.rank == 0:
                writes.append(self._write_adapter(adapter.items()))
        if self.should_save_hf_model:
            whole = self.whole_weights(self.own_weights(), keep)
            if self.rank == 0:
                writes.append(self.write_published(dict(hf_weights(self.model, whole.items()))))
        return writes

    def load_weights(self, folder: Path) -> None:
        # Before the optimizer: weights written after it would replace its fp32 masters.
        stored = stored_hf_tensors(folder / ADAPTER_FOLDER)
        self.copy_weights(folder, stored, adapter_weights(self.model))

    def has_weights(self, folder: Path) -> bool:
        return (folder / ADAPTER_FOLDER).is_dir()

    def save_merged(self, local_path: str | Path) -> None:
        """Make `huggingface/` a whole model, adapters merged, if it is not one already."""
        if not self.should_save_hf_model:
            folder = Path(local_path) / HF_FOLDER
            save_hf_model(merged_copy(self.model), self.processing_class, folder)

    def _write_adapter(self, weights: ItemsView[str, Tensor]) -> Write:
        return lambda folder: save_adapter(self.model, folder / ADAPTER_FOLDER, weights)
