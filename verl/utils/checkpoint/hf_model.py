"""A model as the folder that `from_pretrained` loads: weights, configs, tokenizer, nothing else.

This is also how a checkpoint stores its weights, so there is no merge or conversion afterwards.
Names on disk are those of the published format, whatever layout the module has in memory; tied
weights are stored once. Loading goes back into the module in place: no parameter moves.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming, write_all
from verl.utils.checkpoint.manifest import describe
from verl.utils.checkpoint.safetensors_file import TensorSource, write_safetensors
from verl.utils.checkpoint.tensor_store import NamedArray, as_source, file_suffix, grouped

MAX_SHARD_BYTES = 5 << 30
HF_METADATA = {"format": "pt"}


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
    save_hf_description(model, tokenizer, folder)
    weights = published_weights(model, own_weights(model))
    write_hf_weights(folder, weights, max_shard_bytes=max_shard_bytes)


def save_hf_description(
    model: PreTrainedModel, tokenizer: ProcessingClass | None, folder: str | Path
) -> None:
    """The same folder without the weights."""
    folder = Path(folder)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # torch renames what it cuts
    config.dtype = model.dtype
    with naming(folder):
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            # transformers loads settings that its own save refuses (a temperature to be ignored).
            model.generation_config.to_json_file(folder / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to the weights; nothing is copied."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in tied}
    return {**{name: value.detach() for name, value in model.named_parameters()}, **buffers}


def published_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights under the names, and in the layout, that the model is published with."""
    return revert_weight_conversion(model, dict(weights))


def write_hf_weights(
    folder: str | Path, weights: Mapping[str, Tensor], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    sources = [as_source(NamedArray(name=name, array=weight)) for name, weight in weights.items()]
    write_hf_sources(folder, sources, max_shard_bytes=max_shard_bytes)


def write_hf_sources(
    folder: str | Path, sources: Sequence[TensorSource], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """One tensor at a time, outside Python's lock, so that other threads go on meanwhile."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(grouped(sources, max_shard_bytes))
    files = [f"model{file_suffix(number, len(shards))}" for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard, metadata=HF_METADATA)
    if len(files) < 2:
        return
    index = {
        "metadata": {"total_size": sum(source.num_bytes for source in sources)},
        "weight_map": {
            source.name: file for file, shard in zip(files, shards, strict=True) for source in shard
        },
    }
    path = folder / "model.safetensors.index.json"
    with naming(path), open(path, "wb", buffering=0) as stream:
        write_all(stream, json.dumps(index, indent=2).encode())


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


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
