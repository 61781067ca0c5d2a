"""vLLM in a process of its own: the engine, and how weights come into it.

Everything here runs in vLLM's environment, where only Python, torch and vLLM (with what it needs,
transformers and safetensors among it) are certain to be. The trainer's side is `engine_options`.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {"vLLMRollout": "verl.workers.rollout.replica:EngineProcessRollout"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
