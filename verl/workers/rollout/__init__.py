"""Rollout engines: the built-in one, and adapters for others."""

from typing import Any

from verl.utils.import_utils import lazy_attribute

_LAZY = {"get_rollout_class": "verl.workers.rollout.base:get_rollout_class"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
