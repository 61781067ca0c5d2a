"""Checkpoints of a supervised run, and how it continues from one.

    global_step_N/huggingface/       a folder that `from_pretrained` loads: weights and tokenizer
    global_step_N/lora_adapter/      with LoRA: the adapter, as peft loads it
    global_step_N/optimizer*         master weights, moments, schedule, counters
    global_step_N/data.json          tokens seen so far

With LoRA the base weights do not change and are not saved with every step: `huggingface/` holds
merged weights at the last step, and at every one if `save_contents` has `hf_model`.

Rank 0 writes while the others wait; all read. With Megatron every rank writes the part that it
holds, and `huggingface/` has weights at the last step, and at every one with `hf_model`. A step is
committed whole or not at all (`verl.utils.checkpoint`). The order of the data is a function of seed
and step, and the ranks are equal, so a run may continue on another number of ranks.
"""

import logging
import sys
from errno import EIO
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.convert import to_dict
from verl.config.sft import SFTTrainerBaseConfig
from verl.trainer.common import tracker_locks
from verl.trainer.sft.batches import Ranks
from verl.trainer.sft.settings import AnySFTConfig, SFTSettings
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    HF_FOLDER,
    AdapterCheckpointManager,
    Write,
    as_it_is,
    checkpoint_manager,
)
from verl.utils.checkpoint.layout import LOCK, CheckpointSaveError, as_os_error, step_folder
from verl.utils.checkpoint.manifest import (
    config_identity,
    dataset_identity,
    fingerprint,
    model_identity,
)
from verl.utils.checkpoint.store import CheckpointStore
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import WithProcessorFiles
from verl.workers.engine.base import BaseEngine

logger = logging.getLogger(__name__)

RUN_STATE = "data"


class SFTCheckpoints:
    """Saves the engine under `trainer.default_local_dir` and restores it from there."""

    def __init__(
        self,
        config: AnySFTConfig,
        settings: SFTSettings,
        engine: BaseEngine,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        *,
        num_rows: int,
    ) -> None:
        self.config = settings.trainer
        self.ranks = ranks
        self.root = Path(self.config.default_local_dir).expanduser()
        self.manager = checkpoint_manager(
            engine.module,
            engine,
            processing_class=WithProcessorFiles(tokenizer, copy_to_local(settings.model.path)),
            checkpoint_config=settings.checkpoint,
            **({"rank": ranks.rank, "world_size": ranks.size} if settings.megatron else {}),
        )
        self.store = CheckpointStore(
            self.root,
            fingerprint=fingerprint(
                model=model_identity(engine.module),
                data=dataset_identity(local_files(settings), num_rows=num_rows),
                config=config_identity(to_dict(config)),
            ),
            num_to_keep=self.config.max_ckpt_to_keep or None,
            accepted=self.config.resume_may_change,
        )

    def weights(self, step: int) -> Path:
        """The folder of a saved step that `from_pretrained` loads."""
        return step_folder(self.root, step) / HF_FOLDER

    def save(self, step: int, *, num_tokens: int, is_last: bool) -> None:
        """Commit a step. The line that says so is printed only when nothing can undo it."""
        state = {"step": step, "num_tokens": num_tokens}
        if self.manager.world_size > 1:
            self._save_together(step, state, is_last=is_last)
        elif self.ranks.is_first:
            with self.store.saving(step) as folder:
                self._write(folder, is_last=is_last)
                save_state(folder, RUN_STATE, state)
        if self.ranks.is_first:
            sys.stdout.write(f"COMMITTED step={step}\n")
            sys.stdout.flush()
        self.ranks.meet()

    def resume(self) -> tuple[int, int]:
        """Restore what the configuration says: steps already done, and tokens seen in them."""
        if self.config.resume_mode == "disable":
            return 0, 0
        path = self.config.resume_from_path
        found = self.store.resume(path) if self.ranks.is_first else None
        step = int(self.ranks.sum(found.step if found else 0)[0])
        if step == 0:
            return 0, 0
        folder = Path(path).expanduser() if path is not None else step_folder(self.root, step)
        self.manager.load_checkpoint(str(folder))
        return step, load_state(folder, RUN_STATE)["num_tokens"]

    def _save_together(self, step: int, state: dict[str, int], *, is_last: bool) -> None:
        """Every rank writes what it holds into a folder that the first one makes and commits.

        What the disk refuses to one of them is raised on the first, and nothing is committed.
        """
        writes = self._captured(is_last=is_last)
        if not self.ranks.is_first:
            if folder := self.ranks.hear_first():
                self._try(writes, Path(folder))
            return
        writes.append(partial(save_state, name=RUN_STATE, state=state))
        told = ""
        try:
            with self.store.saving(step) as folder:
                told = self.ranks.hear_first(str(folder))
                refusal = self._try(writes, folder)
                if refusal is not None:
                    raise refusal
        except CheckpointSaveError:
            if not told:  # there is no folder, and the others wait for its name
                self.ranks.hear_first()
            raise

    def _captured(self, *, is_last: bool) -> list[Write]:
        """This rank's writes; with the last step the first one's are whole weights too."""
        writes = self.manager.capture(as_it_is)
        if is_last and not self.manager.should_save_hf_model:
            whole = self.manager.whole_weights(self.manager.own_weights(), in_host_memory)
            if self.ranks.is_first:
                writes.append(self.manager.write_published(whole))
        return writes

    def _try(self, writes: list[Write], folder: Path) -> OSError | None:
        """Write; what the disk refused on any rank."""
        refusal = None
        try:
            for write in writes:
                write(folder)
        except Exception as error:
            refusal = as_os_error(error)
            if refusal is None:
                raise
            logger.warning("rank %d cannot write its part of a step: %s", self.ranks.rank, refusal)
        if self.ranks.agree(refusal is not None) and refusal is None:
            return OSError(EIO, "another rank could not write its part, and says why in its log")
        return refusal

    def _write(self, folder: Path, *, is_last: bool) -> None:
        self.manager.save_checkpoint(str(folder))
        if is_last and isinstance(self.manager, AdapterCheckpointManager):
            self.manager.save_merged(folder)


def in_host_memory(name: str, tensor: Tensor) -> Tensor:
    return tensor.cpu()


def run_locks(trainer: SFTTrainerBaseConfig) -> dict[str, Path]:
    """What a run locks, so that no other writes its files: a lock per option to change instead."""
    lock = Path(trainer.default_local_dir) / LOCK
    return {"trainer.default_local_dir": lock} | tracker_locks(trainer)


def local_files(settings: SFTSettings) -> list[Path]:
    files = settings.data.train_files
    names = [files] if isinstance(files, str) else files
    return [Path(copy_to_local(name)).expanduser() for name in names]
