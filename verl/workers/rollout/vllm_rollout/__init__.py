"""vLLM in a process of its own: its options on our side, the engine and its weights on its side.

`options` runs in the trainer's environment. Everything else runs in vLLM's, where only Python,
torch and vLLM (with what it needs, transformers and safetensors among it) are certain to be.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {"vLLMRollout": "verl.workers.rollout.replica:EngineProcessRollout"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
