"""The base of every section, under the path that users' code names."""

from verl.config.base import BaseConfig

__all__ = ["BaseConfig"]
