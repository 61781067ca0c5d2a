"""Training engines: siblings behind `BaseEngine`, chosen through `EngineRegistry`."""

from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.registry import EngineRegistry
from verl.workers.engine.spec import EngineSpec
from verl.workers.engine.zero1 import Zero1Engine

__all__ = [
    "BaseEngine",
    "EngineRegistry",
    "EngineSpec",
    "FSDPEngine",
    "OneDeviceEngine",
    "Zero1Engine",
]
