"""The checkpoint of a role that holds its whole model in one process.

    huggingface/     the model as `from_pretrained` loads it: weights, config, tokenizer
    optimizer.*      master weights, moments, schedule, counters
    extra.*          learning-rate schedule of its own, if it has one, and the random state

The weights are stored once, in their published format; `model` and `hf_model` mean the same.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.checkpoint.errors import CheckpointMismatchError
from verl.utils.checkpoint.hf_model import load_hf_weights, save_hf_description, save_hf_model
from verl.utils.checkpoint.tensor_store import has_state, load_state, save_state

HF_FOLDER = "huggingface"


class OneDeviceCheckpointManager(BaseCheckpointManager):
    """Writes into, and reads from, a folder that the owner of the step commits and verifies."""

    model: PreTrainedModel

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """`hdfs_path` and `max_ckpt_to_keep` concern whole steps, after they are committed."""
        _refuse("hdfs_path", hdfs_path, "copy the committed step with verl.utils.hdfs_io.copy")
        _refuse("max_ckpt_to_keep", max_ckpt_to_keep, "give it to CheckpointStore")
        folder = Path(local_path)
        save = save_hf_model if self._should_save_weights else save_hf_description
        save(self.model, self.processing_class, folder / HF_FOLDER)
        if self.optimizer is not None and self.should_save_optimizer:
            save_state(folder, "optimizer", self.optimizer.state_dict())
        if self.should_save_extra:
            save_state(folder, "extra", self._extra_state())

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """The random state comes last, because loading itself may draw."""
        _refuse("hdfs_path", hdfs_path, "copy the step to a local folder first")
        _refuse(
            "del_local_after_load",
            del_local_after_load or None,
            "a step is deleted after a newer one is committed: CheckpointStore(num_to_keep=1)",
        )
        folder = Path(local_path)
        self._refuse_missing(folder)
        if self.should_load_model:
            load_hf_weights(self.model, folder / HF_FOLDER)
        if self.optimizer is not None and self.should_load_optimizer:
            self.optimizer.load_state_dict(load_state(folder, "optimizer"))
        if self.should_load_extra:
            self._load_extra_state(load_state(folder, "extra"))

    @property
    def _should_save_weights(self) -> bool:
        return self.should_save_model or self.should_save_hf_model

    def _extra_state(self) -> dict[str, Any]:
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {"lr_scheduler": schedule, "rng": self.get_rng_state()}

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        self.load_rng_state(extra["rng"])

    def _refuse_missing(self, folder: Path) -> None:
        present = {
            "model": any((folder / HF_FOLDER).glob("*.safetensors")),
            "optimizer": has_state(folder, "optimizer"),
            "extra": has_state(folder, "extra"),
        }
        wanted = self.checkpoint_config.load_contents
        missing = [name for name, is_there in present.items() if name in wanted and not is_there]
        if missing:
            held = ", ".join(name for name, is_there in present.items() if is_there) or "nothing"
            raise CheckpointMismatchError(
                folder,
                [f"it holds {held}; load_contents also asks for {', '.join(missing)}"],
            )


def _refuse(name: str, value: object, way_out: str) -> None:
    if value is not None:
        raise ValueError(f"{name} is {value!r}, which one role of a step cannot do; {way_out}")
