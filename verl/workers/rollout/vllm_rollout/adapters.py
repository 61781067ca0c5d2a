"""Weights in the forms that vLLM reads: adapters from folders, tensors under published names.

A LoRA adapter is replaced by every update, while the base weights stay as they are. An update's
tensors are written to a fresh folder in peft's format and loaded under a new number; the old
adapter is removed before anything is generated again, so no request can meet it.

A Hugging Face module may hold weights in another form than the files it was loaded from: the
experts of a layer, for instance, are one tensor in the module and two or three per expert in the
files. The trainer sends what the module holds; Transformers knows the way back to the published
form, since saving a model takes it.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from vllm.lora.request import LoRARequest

from verl.workers.rollout.adapter_names import in_peft_format


class AdapterFolder:
    """The adapter in use, and where it is on disk. `config` is peft's `adapter_config.json`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._in_use: Any = None
        self._num_updates = 0

    def request(self) -> Any:
        """What a request must carry to be answered with the adapter."""
        if self._in_use is None:
            raise ValueError("no adapter has been sent to this engine yet; send one first")
        return self._in_use

    def replace(self, weights: Iterable[tuple[str, Tensor]], engine: Any) -> None:
        """Use these tensors from now on; until all of them are loaded there is no adapter."""
        before, self._in_use = self._in_use, None
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        self._num_updates += 1
        folder = tempfile.TemporaryDirectory(prefix="verl-adapter-")
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()  # a bucket's memory is used again
            for name, tensor in in_peft_format(weights)
        }
        save_file(tensors, Path(folder.name) / "adapter_model.safetensors")
        (Path(folder.name) / "adapter_config.json").write_text(json.dumps(self._config))
        request = LoRARequest(f"policy-{self._num_updates}", self._num_updates, folder.name)
        if not engine.add_lora(request):
            raise RuntimeError(f"vLLM did not take the adapter of {len(tensors)} tensors")
        self._folder, self._in_use = folder, request


Weights = Iterable[tuple[str, Tensor]]


def published_form(
    model_path: str, *, trust_remote_code: bool = False
) -> Callable[[Weights], Iterator[tuple[str, Tensor]]]:
    """A function that turns a module's weights into those of its files.

    A model whose code is not part of transformers is taken to have no other form.
    """
    config = transformers.AutoConfig.from_pretrained(
        model_path, trust_remote_code=trust_remote_code
    )
    architecture = (config.architectures or [""])[0]
    if architecture not in dir(transformers):
        return iter
    with torch.device("meta"):
        skeleton = getattr(transformers, architecture)(config)
    # Asked once for all: looking for the conversions of one tensor goes through every module.
    parameters = dict(skeleton.named_parameters())
    published = revert_weight_conversion(skeleton, parameters)
    unchanged = {name for name, weight in parameters.items() if published.get(name) is weight}

    def convert(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name in unchanged:
                yield name, tensor
            else:
                yield from revert_weight_conversion(skeleton, {name: tensor}).items()

    return convert
