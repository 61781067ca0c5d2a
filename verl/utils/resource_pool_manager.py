"""`ResourcePoolManager` under the path that older documents name; Ray is imported on first use."""

from typing import TYPE_CHECKING, Any

from verl.utils.import_utils import lazy_attribute

if TYPE_CHECKING:
    from verl.single_controller.ray import ResourcePoolManager

__all__ = ["ResourcePoolManager"]

_LAZY = {"ResourcePoolManager": "verl.single_controller.ray:ResourcePoolManager"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)
