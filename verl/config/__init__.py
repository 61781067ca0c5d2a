"""Every option once: a dataclass field, its default, and the sentence that documents it."""

from verl.config.base import BaseConfig
from verl.config.roots import ROOTS

__all__ = ["ROOTS", "BaseConfig"]
