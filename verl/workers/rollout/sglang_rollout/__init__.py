"""SGLang behind our protocol: its HTTP server runs as a child of the engine's process.

`options` runs in the trainer's environment. Everything else runs in SGLang's and needs the standard
library, torch and safetensors alone; what it asks of SGLang are the server's native endpoints.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {"SGLangRollout": "verl.workers.rollout.replica:EngineProcessRollout"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
