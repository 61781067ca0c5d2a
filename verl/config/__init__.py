"""Every option once: a dataclass field, its default, and the sentence that documents it."""

from verl.config.base import BaseConfig
from verl.config.schema import ROOTS

__all__ = ["ROOTS", "BaseConfig"]
