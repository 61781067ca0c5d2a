"""SGLang behind our protocol: its HTTP server runs as a child of the engine's process.

Everything here runs in SGLang's environment and needs the standard library, torch and safetensors
alone; it asks SGLang by the server's native endpoints. The trainer's side is `engine_options`.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {"SGLangRollout": "verl.workers.rollout.replica:EngineProcessRollout"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
