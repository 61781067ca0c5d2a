"""The checkpoint of a role that trains adapters.

    lora_adapter/    the adapter as peft loads it
    huggingface/     config and tokenizer; with `hf_model` in `save_contents` merged weights too

The rest is as for every role (`fsdp_checkpoint_manager`). The base weights do not change and are
not saved: a run continues on the base model it names.
"""

from collections.abc import ItemsView
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from verl.config.checkpoint import CheckpointConfig
from verl.models.lora import (
    ADAPTER_FOLDER,
    adapter_weights,
    has_lora,
    hf_weights,
    merged_copy,
    save_adapter,
)
from verl.utils.checkpoint.checkpoint_manager import Stateful
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    HF_FOLDER,
    FSDPCheckpointManager,
    Keep,
    Write,
)
from verl.utils.checkpoint.hf_model import ProcessingClass, own_weights, save_hf_model
from verl.utils.checkpoint.piece_files import stored_hf_tensors


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
    return kind(
        model,
        optimizer,
        processing_class=processing_class,
        checkpoint_config=checkpoint_config,
        rank=rank,
        world_size=world_size,
    )


class AdapterCheckpointManager(FSDPCheckpointManager):
    """The same, with the adapter in place of the weights."""

    def capture_weights(self, keep: Keep) -> list[Write]:
        writes: list[Write] = [self.describe] if self.rank == 0 else []
        if self.should_save_model or self.should_save_hf_model:
            trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
            adapter = self.whole_weights(trained, keep)
            if self.rank == 0:
                writes.append(self._write_adapter(adapter.items()))
        if self.should_save_hf_model:
            whole = self.whole_weights(own_weights(self.model), keep)
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
