"""A LoRA adapter that every update replaces, while the base weights stay as they are.

An update's tensors go into a folder in peft's format, which the server loads under a new name; the
old adapter is unloaded before, so no request can meet it.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from verl.workers.rollout.adapter_names import in_peft_format
from verl.workers.rollout.sglang_rollout.http_client import ServerClient, ServerRefusedError
from verl.workers.rollout.sglang_rollout.weight_folder import weight_folder

LOAD_SECONDS = 300.0


class ServedAdapter:
    """The adapter in use. `config` is peft's `adapter_config.json`."""

    def __init__(self, client: ServerClient, config: Mapping[str, Any]) -> None:
        self._client = client
        self._config = dict(config)
        self._in_use: str | None = None
        self._num_updates = 0

    def name(self) -> str:
        """What a request must carry to be answered with the adapter."""
        if self._in_use is None:
            raise ValueError("no adapter has been sent to this engine yet; send one first")
        return self._in_use

    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use these tensors from now on; until all of them are loaded there is no adapter."""
        before, self._in_use = self._in_use, None
        if before is not None:
            self._client.call("/unload_lora_adapter", {"lora_name": before}, seconds=LOAD_SECONDS)
        self._num_updates += 1
        name = f"policy-{self._num_updates}"
        with weight_folder(in_peft_format(weights), file_bytes=sys.maxsize) as folder:
            (folder / "weights-00000.safetensors").rename(folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(self._config))
            body = {"lora_name": name, "lora_path": str(folder)}
            try:
                self._client.call("/load_lora_adapter", body, seconds=LOAD_SECONDS)
            except ServerRefusedError as refusal:
                raise ValueError(f"SGLang did not take the adapter: {refusal}") from refusal
        self._in_use = name
