"""Checkpoints of a supervised run, and how it continues from one.

    global_step_N/huggingface/       a folder that `from_pretrained` loads: weights and tokenizer
    global_step_N/optimizer*         master weights, moments, schedule, counters

A step is committed whole or not at all (`verl.utils.checkpoint`). The order of the data is a
function of seed and step, so the step number is all a resumed run needs beside the optimizer.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.config.convert import to_dict
from verl.config.sft import SFTConfig
from verl.utils.checkpoint.identity import (
    config_identity,
    dataset_identity,
    fingerprint,
    model_identity,
)
from verl.utils.checkpoint.layout import step_folder
from verl.utils.checkpoint.one_device import HF_FOLDER, OneDeviceCheckpointManager
from verl.utils.checkpoint.store import CheckpointStore
from verl.utils.fs import copy_to_local
from verl.workers.engine.one_device import OneDeviceEngine


class SFTCheckpoints:
    """Saves the engine under `trainer.default_local_dir` and restores it from there."""

    def __init__(
        self,
        config: SFTConfig,
        engine: OneDeviceEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_rows: int,
    ) -> None:
        self.config = config.trainer
        self.root = Path(self.config.default_local_dir).expanduser()
        self.manager = OneDeviceCheckpointManager(
            engine.module,
            engine,
            processing_class=tokenizer,
            checkpoint_config=self.config.checkpoint,
        )
        self.store = CheckpointStore(
            self.root,
            fingerprint=fingerprint(
                model=model_identity(engine.module),
                data=dataset_identity(local_files(config), num_rows=num_rows),
                config=config_identity(to_dict(config)),
            ),
            num_to_keep=self.config.max_ckpt_to_keep,
        )

    def weights(self, step: int) -> Path:
        """The folder of a saved step that `from_pretrained` loads."""
        return step_folder(self.root, step) / HF_FOLDER

    def save(self, step: int) -> None:
        with self.store.saving(step) as folder:
            self.manager.save_checkpoint(str(folder))

    def resume(self) -> int:
        """Restore what the configuration says, and give the number of steps already done."""
        if self.config.resume_mode == "disable":
            return 0
        found = self.store.resume(self.config.resume_from_path)
        if found is None:
            return 0
        self.manager.load_checkpoint(str(found.path))
        return found.step


def local_files(config: SFTConfig) -> list[Path]:
    files = config.data.train_files
    names = [files] if isinstance(files, str) else files
    return [Path(copy_to_local(name)).expanduser() for name in names]
