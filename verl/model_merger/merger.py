"""From the folder of a role in a checkpoint to a folder that `from_pretrained` loads.

    find the weights -> names and layout as published -> bf16 -> safetensors, config, tokenizer

Weights are whole tensors that are put together when asked for: a `LazyTensor` reads the parts of
one tensor from the files of all ranks. One tensor is in memory at a time, unless the model's layout
in memory differs from the published one (experts that are stored one by one and computed together):
then all of them are.

Our own checkpoints of adapters hold the adapter alone; the base is the model that its config names.
Files of other runs hold base and adapter together, in the names that peft gives them while
training; they are merged, or kept beside each other. `compare_weights` checks two sets tensor by
tensor.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.config.engine import McoreEngineConfig
from verl.model_merger.config import ModelMergerConfig
from verl.models.lora import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    LoraOptions,
    add_lora,
    is_adapter,
    merged_copy,
)
from verl.utils.checkpoint.dist_checkpoint import read_index
from verl.utils.checkpoint.hf_model import own_weights, published_weights, write_hf_sources
from verl.utils.checkpoint.piece_files import (
    StoredTensor,
    read_piece,
    stored_hf_tensors,
    stored_masters,
    stored_tensors,
)
from verl.utils.checkpoint.pieces import whole
from verl.utils.checkpoint.safetensors_file import TensorSource
from verl.utils.checkpoint.tensor_store import NamedArray, as_source
from verl.utils.checkpoint.torch_file import TorchShard, TorchTensor, read_torch_file
from verl.utils.user_files import read_json_object
from verl.workers.engine import megatron

AUTO_CLASSES = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForCausalLM": AutoModelForCausalLM,
    "ForConditionalGeneration": AutoModelForImageTextToText,
}


WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")
BASE_LAYER = ".base_layer"


def base_of(adapter: Path) -> str:
    base = read_json_object(adapter / CONFIG_FILE).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{adapter / CONFIG_FILE} does not name the model that the adapter belongs to; write "
            "its path there, as base_model_name_or_path"
        )
    return str(base)


class Difference(NamedTuple):
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


LazyWeights = dict[str, LazyTensor]


def _problem(merged: LazyWeights, reference: LazyWeights, name: str) -> str | None:
    ours, theirs = merged[name], reference[name]
    if ours.shape != theirs.shape:
        return f"has the shape {list(ours.shape)} and not {list(theirs.shape)}"
    expected = theirs.read()
    distance = (ours.read().to(expected.dtype).double() - expected.double()).abs()
    largest = float(distance.max()) if distance.numel() else 0.0
    if torch.isnan(distance).any() or largest > TOLERANCE:
        return f"differs by up to {largest:.3g}"
    return None


def lazy(stored: dict[str, StoredTensor]) -> LazyWeights:
    return {
        name: LazyTensor(dtype=tensor.dtype, shape=tensor.shape, read=partial(read_whole, tensor))
        for name, tensor in stored.items()
    }


def lazy_tensor(tensor: Tensor) -> LazyTensor:
    """A tensor that is in memory already."""
    return LazyTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor)


def saved_world_size(folder: Path, files: list[Path]) -> int:
    path = folder / "fsdp_config.json"
    if path.is_file():
        return int(read_json_object(path)["world_size"])
    sizes = {re.findall(r"[0-9]+", file.name)[0] for file in files}
    if len(sizes) != 1:
        raise ValueError(
            f"{folder} holds files of runs on {' and '.join(sorted(sizes))} ranks and no "
            "fsdp_config.json that says which one counts; remove the others"
        )
    return int(sizes.pop())


def joined(folder: Path, name: str, parts: list[TorchTensor | TorchShard | None]) -> LazyTensor:
    """One tensor from all ranks' parts of it."""
    first = parts[0]
    if isinstance(first, TorchTensor):
        return LazyTensor(dtype=first.dtype, shape=first.shape, read=first.read)
    shards = [part for part in parts if isinstance(part, TorchShard) and part.is_first_copy]
    assert isinstance(first, TorchShard)
    dim = first.sharded_dim
    kinds = {(shard.shape, shard.sharded_dim, shard.local.dtype) for shard in shards}
    if len(kinds) != 1 or None in parts:
        raise ValueError(f"{folder}: the ranks disagree about {name}")
    if dim is None:
        return LazyTensor(dtype=first.local.dtype, shape=first.shape, read=first.local.read)
    in_order = sorted(shards, key=lambda shard: shard.index)
    local_parts = [shard.local for shard in in_order]
    others = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in local_parts}
    is_whole = sum(t.shape[dim] for t in local_parts) == first.shape[dim]
    if others != {(*first.shape[:dim], *first.shape[dim + 1 :])} or not is_whole:
        raise ValueError(f"{folder}: the parts of {name} do not make up a tensor of {first.shape}")
    return LazyTensor(
        dtype=first.local.dtype,
        shape=first.shape,
        read=lambda: torch.cat([local.read() for local in local_parts], dim=dim),
    )


DIST_CHECKPOINT = "dist_ckpt"


class FSDPModelMerger:
    """Merges what the ranks of a data-parallel or sharded run have written."""

    def __init__(self, config: ModelMergerConfig) -> None:
        self.config = config
        self.folder = Path(config.local_dir)
        if not (config.description / "config.json").is_file():
            roles = [*self.folder.glob("actor"), *self.folder.glob("global_step_*/actor")]
            if roles:  # longer numbers are later steps
                meant = max(roles, key=lambda role: (len(str(role)), str(role)))
                raise ValueError(
                    f"local_dir is {self.folder}, the folder of a run or a step; give the folder "
                    f"of a role, such as {meant}"
                )
            raise ValueError(
                f"{config.description} has no config.json; copy config and tokenizer of the model "
                "there, or give their folder as hf_model_config_path"
            )

    def merge_and_save(self) -> None:
        """Write `target_dir`, and upload it if the configuration says so."""
        assert self.config.target_dir is not None
        target = Path(self.config.target_dir)
        if list(target.glob("*.safetensors")):
            raise ValueError(
                f"target_dir is {target}, which holds weights already; name a new folder, or "
                "remove that one"
            )
        weights = self.merged_weights()
        target.mkdir(parents=True, exist_ok=True)
        if has_adapter_names(weights):
            weights, adapter = split_adapter(weights)
            write_adapter(adapter, self.folder / ADAPTER_FOLDER, target / ADAPTER_FOLDER)
        copy_description(self.config.description, target)
        sources = [as_bf16_source(name, tensor) for name, tensor in weights.items()]
        write_hf_sources(target, sources)
        if self.config.hf_upload_path:
            upload(target, self.config.hf_upload_path, private=self.config.private)

    def compare(self) -> list[Difference]:
        """What differs between the merged weights and `test_hf_dir`; empty when nothing does."""
        assert self.config.test_hf_dir is not None
        other = weights_of_model_folder(Path(self.config.test_hf_dir))
        if other is None:
            raise ValueError(f"test_hf_dir {self.config.test_hf_dir} holds no safetensors weights")
        weights = self.merged_weights()
        if has_adapter_names(weights):
            weights, _ = split_adapter(weights)
        return compare_weights(weights, other)

    def cleanup(self) -> None:
        """Does nothing: no file is kept open between calls."""

    def merged_weights(self) -> LazyWeights:
        """Whole weights under their published names."""
        as_in_memory = weights_of_shard_files(self.folder)
        if as_in_memory is None and (self.folder / ADAPTER_FOLDER).is_dir():
            return self._with_adapter_merged()
        if as_in_memory is None:
            as_in_memory = weights_of_pieces(self.folder)
            published = weights_of_model_folder(self.folder / "huggingface")
            if published is not None:
                return published
        if as_in_memory is None:
            raise ValueError(
                f"{self.folder} holds no weights: neither model_world_size_*_rank_*.pt nor "
                "model.rank_*_of_* nor huggingface/*.safetensors; give the actor or critic folder"
            )
        return self._published(as_in_memory)

    def _with_adapter_merged(self) -> LazyWeights:
        if not self._skeleton().can_generate():
            raise ValueError(
                f"{self.folder / ADAPTER_FOLDER} belongs to a value model, which has no base to be "
                "merged into; use the adapter with peft"
            )
        return merge_saved_adapter(self.folder, trust_remote_code=self.config.trust_remote_code)

    def _published(self, weights: LazyWeights) -> LazyWeights:
        if has_adapter_names(weights):  # names of a base model inside peft's
            return weights
        skeleton = self._skeleton()
        kept = own_weights(skeleton)
        tied = skeleton.state_dict().keys() - kept.keys()
        if self.config.tie_word_embedding:
            tied |= {"lm_head.weight"}
        weights = {name: tensor for name, tensor in weights.items() if name not in tied}
        if weights.keys() - kept.keys():  # not as in memory here, so as published
            return weights
        missing = sorted(kept.keys() - tied - weights.keys())
        if missing:
            raise ValueError(f"{self.folder} lacks weights of the model: {', '.join(missing[:5])}")
        if (
            published_weights(skeleton, {name: kept[name] for name in weights}).keys()
            == weights.keys()
        ):
            return weights
        converted = published_weights(skeleton, {name: t.read() for name, t in weights.items()})
        return {name: lazy_tensor(tensor) for name, tensor in converted.items()}

    def _skeleton(self) -> PreTrainedModel:
        """The model without weights, for its names and its layout."""
        trust = self.config.trust_remote_code
        config = AutoConfig.from_pretrained(self.config.description, trust_remote_code=trust)
        architecture = "ForTokenClassification" if self.config.is_value_model else ""
        architecture = architecture or str((config.architectures or [""])[0])
        for suffix, kind in AUTO_CLASSES.items():
            if architecture.endswith(suffix):
                with torch.device("meta"):
                    return kind.from_config(config, trust_remote_code=trust)
        raise ValueError(
            f"{self.config.description / 'config.json'} says architectures "
            f"{config.architectures}; known are names that end in {', '.join(AUTO_CLASSES)}"
        )


class MegatronModelMerger(FSDPModelMerger):
    """Merges what the ranks of a Megatron layout have written: the same files, under the same
    Hugging Face names; or a distributed checkpoint of Megatron's own, read into a model here."""

    def merged_weights(self) -> LazyWeights:
        folder = self.folder / DIST_CHECKPOINT
        if not folder.is_dir():
            return super().merged_weights()
        weights = weights_of_dist_checkpoint(
            folder, self._skeleton, is_value_model=self.config.is_value_model
        )
        return self._published({name: lazy_tensor(weight) for name, weight in weights.items()})


def as_bf16_source(name: str, tensor: LazyTensor) -> TensorSource:
    """What is written for a tensor; floating-point numbers become bf16."""
    dtype = torch.bfloat16 if tensor.dtype.is_floating_point else tensor.dtype
    outline = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return replace(
        as_source(NamedArray(name=name, array=outline)),
        read=lambda: NamedArray(name=name, array=tensor.read().to(dtype)).read(),
    )


def copy_description(source: Path, target: Path) -> None:
    """Config and tokenizer, and the dtype that the merged weights have."""
    weights = {file for pattern in WEIGHT_FILES for file in source.glob(pattern)}
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.is_symlink() and file not in weights:
            shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    content = read_json_object(path)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = "bfloat16"
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def upload(folder: Path, repository: str, *, private: bool) -> None:
    from huggingface_hub import HfApi  # noqa: PLC0415  # only for those who upload

    api = HfApi()
    api.create_repo(repo_id=repository, private=private, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=repository, repo_type="model")


def merge_saved_adapter(folder: Path, *, trust_remote_code: bool) -> LazyWeights:
    """The base model that the adapter names, with the adapter added to its weights."""
    path = str(folder / ADAPTER_FOLDER)
    options = LoraOptions(rank=0, adapter_path=path)
    base = base_of(folder / ADAPTER_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", trust_remote_code=trust_remote_code
    )
    merged = merged_copy(add_lora(model, options))
    weights = published_weights(merged, own_weights(merged))
    return {name: lazy_tensor(weight) for name, weight in weights.items()}


def has_adapter_names(weights: LazyWeights) -> bool:
    return any(is_adapter(name) for name in weights)


def split_adapter(weights: LazyWeights) -> tuple[LazyWeights, LazyWeights]:
    """The base's weights under their own names, and the adapter's under peft's names on disk."""
    base = {
        name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, ""): tensor
        for name, tensor in weights.items()
        if not is_adapter(name)
    }
    adapter = {
        name.replace(".default.", "."): tensor
        for name, tensor in weights.items()
        if is_adapter(name)
    }
    return base, adapter


def write_adapter(weights: LazyWeights, source: Path, target: Path) -> None:
    """An adapter folder as peft loads it; its scale is in the config, which nobody can guess."""
    config = source / CONFIG_FILE
    if not config.is_file():
        raise ValueError(
            f"the shards hold an adapter, but {config} is missing, which says how it is scaled "
            "(lora_alpha); put the adapter's config there"
        )
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, target / CONFIG_FILE)
    tensors = {name: tensor.read() for name, tensor in weights.items()}
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})


TOLERANCE = 1e-6


def compare_weights(merged: LazyWeights, reference: LazyWeights) -> list[Difference]:
    """Every tensor that is missing, too many, of another shape, or of other values.

    Values are compared in the number format of the reference, which may be a rounded one.
    """
    found = [
        Difference(name, "is not in the reference")
        for name in sorted(merged.keys() - reference.keys())
    ]
    found += [Difference(name, "is missing") for name in sorted(reference.keys() - merged.keys())]
    shared = sorted(merged.keys() & reference.keys())
    for name in tqdm(shared, desc="comparing", unit="tensor"):
        problem = _problem(merged, reference, name)
        if problem is not None:
            found.append(Difference(name, problem))
    return found


def weights_of_shard_files(folder: Path) -> LazyWeights | None:
    """`model_world_size_W_rank_R.pt`, one file per rank."""
    found = sorted(folder.glob("model_world_size_*_rank_*.pt"))
    if not found:
        return None
    world_size = saved_world_size(folder, found)
    files = [folder / f"model_world_size_{world_size}_rank_{r}.pt" for r in range(world_size)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing[:4])}; every rank's file is needed")
    ranks = [read_torch_file(file, rank=rank) for rank, file in enumerate(files)]
    return {name: joined(folder, name, [rank.get(name) for rank in ranks]) for name in ranks[0]}


def weights_of_pieces(folder: Path) -> LazyWeights | None:
    """The weights that ranks have written in pieces, or their fp32 masters."""
    stored = stored_tensors(folder, "model") or stored_masters(stored_tensors(folder, "optimizer"))
    return lazy(stored) if stored else None


def weights_of_dist_checkpoint(
    folder: Path, skeleton: Callable[[], PreTrainedModel], *, is_value_model: bool
) -> dict[str, Tensor]:
    """All weights of a distributed checkpoint, in memory; megatron-core knows their layout."""
    read_index(folder)  # a mistake is named before a model is built
    path = str(folder)
    engine = megatron.MegatronEngine(
        skeleton,
        build_skeleton=skeleton,
        config=McoreEngineConfig(
            use_dist_checkpointing=True,
            dist_checkpointing_path=path,
            override_transformer_config={},
        ),
        compute_dtype=torch.float32,
        device="cpu",
        is_value_model=is_value_model,
    )
    try:
        engine.initialize()
        return dict(engine.get_per_tensor_param())
    finally:
        megatron.leave_layout()


def weights_of_model_folder(folder: Path) -> LazyWeights | None:
    """What `from_pretrained` loads."""
    stored = stored_hf_tensors(folder)
    return lazy(stored) if stored else None


def read_whole(stored: StoredTensor) -> Tensor:
    return read_piece(stored, whole(stored.shape)).view(stored.shape)
