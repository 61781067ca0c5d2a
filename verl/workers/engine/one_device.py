"""Training on one device: the Hugging Face module itself, its weights stored once.

Nothing is wrapped or sharded, so parameters keep their addresses for the life of the process and
the built-in rollout engine generates with the very same storage. (Weights that nobody shares may be
offloaded to CPU memory between calls; that is `MemoryOptions.param_offload`.)
"""

from functools import partial

from transformers import PreTrainedModel

from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.optimizer import MasterOptimizer
from verl.workers.engine.registry import MODEL_TYPES, EngineRegistry
from verl.workers.engine.spec import EngineSpec
from verl.workers.engine.stepping import SteppingEngine


@EngineRegistry.register(model_type=MODEL_TYPES, backend="one_device")
class OneDeviceEngine(SteppingEngine):
    """A causal language model or a value model on one device."""

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> "OneDeviceEngine":
        load = partial(spec.load_module, spec.dtype, spec.device)
        return cls(load, spec.optimizer, memory=spec.memory(whole_weights=True), **spec.options())

    def load_module(self) -> PreTrainedModel:
        return self._build_model()

    def build_optimizer(self, config: FSDPOptimizerConfig) -> MasterOptimizer:
        return MasterOptimizer(
            self.module.named_parameters(), config, offload=self.memory.optimizer_offload
        )
