"""From the folder of a role in a checkpoint to a folder that `from_pretrained` loads.

    find the weights -> names and layout as published -> bf16 -> safetensors, config, tokenizer

One tensor is in memory at a time, unless the model's layout in memory differs from the published
one (experts that are stored one by one and computed together): then all of them are.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.model_merger.adapters import (
    has_adapter_names,
    merge_saved_adapter,
    split_adapter,
    write_adapter,
)
from verl.model_merger.compare import Difference, compare_weights
from verl.model_merger.config import ModelMergerConfig
from verl.model_merger.weights import (
    LazyTensor,
    LazyWeights,
    lazy_tensor,
    weights_of_model_folder,
    weights_of_pieces,
    weights_of_shard_files,
)
from verl.models.lora import ADAPTER_FOLDER
from verl.utils.checkpoint.hf_model import own_weights, published_weights, write_hf_sources
from verl.utils.checkpoint.safetensors_file import TensorSource
from verl.utils.checkpoint.tensor_store import NamedArray, as_source

AUTO_CLASSES = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForCausalLM": AutoModelForCausalLM,
    "ForConditionalGeneration": AutoModelForImageTextToText,
}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")


class FSDPModelMerger:
    """Merges what the ranks of a data-parallel or sharded run have written."""

    def __init__(self, config: ModelMergerConfig) -> None:
        self.config = config
        self.folder = Path(config.local_dir)
        if not (config.description / "config.json").is_file():
            raise ValueError(
                f"{config.description} has no config.json; copy config and tokenizer of the model "
                "there, or give their folder as hf_model_config_path"
            )

    def merge_and_save(self) -> None:
        """Write `target_dir`, and upload it if the configuration says so."""
        assert self.config.target_dir is not None
        target = Path(self.config.target_dir)
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
        """Nothing is kept open between calls."""

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
    content = json.loads(path.read_text())
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = "bfloat16"
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def upload(folder: Path, repository: str, *, private: bool) -> None:
    from huggingface_hub import HfApi  # noqa: PLC0415  # only for those who upload

    api = HfApi()
    api.create_repo(repo_id=repository, private=private, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=repository, repo_type="model")
