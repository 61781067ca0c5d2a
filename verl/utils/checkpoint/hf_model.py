"""A model as the folder that `from_pretrained` loads: weights, configs, tokenizer, nothing else.

This is also how a checkpoint stores its weights, so there is no merge or conversion afterwards.
Names on disk are those of the published format, whatever layout the module has in memory; tied
weights are stored once. Loading goes back into the module in place: no parameter moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from verl.utils.checkpoint.durable import naming
from verl.utils.checkpoint.errors import CheckpointCorruptError
from verl.utils.checkpoint.identity import describe

MAX_SHARD_BYTES = 5 << 30


class ProcessingClass(Protocol):
    """A tokenizer or a processor."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


def save_hf_model(
    model: PreTrainedModel,
    tokenizer: ProcessingClass | None,
    folder: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights, config, generation config and tokenizer. Needs memory for no second copy."""
    folder = Path(folder)
    own = model.generation_config if model.can_generate() else None
    with naming(folder), _no_progress_bar(), _default_generation_config(model):
        model.save_pretrained(folder, max_shard_size=max_shard_bytes)
    _save_companions(own, tokenizer, folder)


def save_hf_description(
    model: PreTrainedModel, tokenizer: ProcessingClass | None, folder: str | Path
) -> None:
    """The same folder without the weights."""
    folder = Path(folder)
    with naming(folder):
        model.config.save_pretrained(folder)
    own = model.generation_config if model.can_generate() else None
    _save_companions(own, tokenizer, folder)


@torch.no_grad()
def load_hf_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the weights in `folder` into `model`, in place.

    The folder is read into a second module on the CPU, because names and layout on disk are not
    those in memory. Every weight must be there, with the same shape and dtype.
    """
    with _no_progress_bar():
        twin, loading = type(model).from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            folder,
            dtype=model.dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    wrong = [
        f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(loading[kind], key=str)[:5]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if loading[kind]
    ]
    stored, own = twin.state_dict(), model.state_dict()
    wrong += [
        f"{name} is {describe(stored.get(name))} and the model's is {describe(weight)}"
        for name, weight in own.items()
        if describe(stored.get(name)) != describe(weight)
    ]
    if wrong:
        raise CheckpointCorruptError(Path(folder), wrong[:8])
    for name, weight in own.items():
        weight.copy_(stored[name])


def _save_companions(
    generation_config: GenerationConfig | None, tokenizer: ProcessingClass | None, folder: Path
) -> None:
    with naming(folder):
        if generation_config is not None:
            generation_config.to_json_file(folder / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


@contextmanager
def _default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """transformers loads generation settings that it then refuses to save (a temperature without
    `do_sample`); it is given others to save, and ours are written afterwards as they are."""
    if not model.can_generate():
        yield
        return
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
