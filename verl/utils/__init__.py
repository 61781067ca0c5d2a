"""Helpers that know nothing of reinforcement learning.

The names that users import from here are loaded on first use, so that `verl.utils.registry` and
the configuration stay free of torch.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {
    "as_torch_index": "verl.utils.groupwise:as_torch_index",
    "group_mean_std": "verl.utils.groupwise:group_mean_std",
    "hf_processor": "verl.utils.tokenizer:hf_processor",
    "hf_tokenizer": "verl.utils.tokenizer:hf_tokenizer",
    "omega_conf_to_dataclass": "verl.config.convert:omega_conf_to_dataclass",
    "tensordict_utils": "verl.utils.tensordict_utils",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
