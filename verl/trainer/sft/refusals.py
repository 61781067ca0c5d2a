"""Valid options that a supervised run cannot honour, refused by name before anything is loaded.

Only what would change the result or the memory needed is here; options that merely do nothing are
reported as unused at the end of a run. Nothing here imports torch.
"""

from collections.abc import Iterator
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.faults import Fault, shown
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.sft import EACH_EPOCH, SFTConfig, SFTEngineConfig
from verl.utils.import_utils import is_available

AnySFTConfig = SFTConfig | SFTEngineConfig

ON_THE_DEVICE = "weights and optimizer stay on the device"
COMMON = {
    "model.use_liger": "layers are those of transformers",
    "trainer.default_hdfs_dir": "checkpoints are written to a local folder",
}
OF_FSDP = {
    "model.fsdp_config.cpu_offload": ON_THE_DEVICE,
    "model.fsdp_config.offload_params": ON_THE_DEVICE,
}
OF_ENGINE = {
    "model.hf_config_path": "config.json is read beside the weights",
    "model.enable_activation_offload": "activations stay on the device",
    "model.tiled_mlp.enabled": "layers run over whole sequences",
    "model.mtp.enable": "heads that predict several tokens ahead are not trained",
    "engine.param_offload": ON_THE_DEVICE,
    "engine.optimizer_offload": ON_THE_DEVICE,
    "engine.offload_policy": ON_THE_DEVICE,
    "engine.forward_only": "fine-tuning needs an optimizer",
}
"""Options that must be left at null or False, and why."""


def unsupported(config: AnySFTConfig) -> Iterator[Fault]:
    """One fault for each option that cannot be honoured."""
    if isinstance(config, SFTEngineConfig):
        faults = list(engine_faults(config))
        yield from faults or refused(config, COMMON | OF_ENGINE)
        yield from [] if faults else sequence_faults(config, "engine.")
    else:
        yield from refused(config, COMMON | OF_FSDP)
        yield from sequence_faults(config, "")
    yield from frequency_faults(config)
    yield from lora_faults(config)
    yield from resume_faults(config)


def refused(config: AnySFTConfig, rules: dict[str, str]) -> Iterator[Fault]:
    for key, rule in rules.items():
        value = at(config, key)
        if value:
            yield Fault(f"{key} is {shown(value)}; {rule}: leave it out", (key,))


def engine_faults(config: SFTEngineConfig) -> Iterator[Fault]:
    is_fsdp = isinstance(config.engine, FSDPEngineConfig)
    if not is_fsdp or not isinstance(config.optim, FSDPOptimizerConfig):
        text = (
            f'engine.strategy is "{config.engine.strategy}" and the optimizer is '
            f"{type(config.optim).__name__}; fine-tuning runs with engine=fsdp optim=fsdp"
        )
        yield Fault(text, ("engine.strategy",))


def sequence_faults(config: AnySFTConfig, prefix: str) -> Iterator[Fault]:
    key = f"{prefix}ulysses_sequence_parallel_size"
    if at(config, key) > 1:
        text = f"{key} is {at(config, key)}; a sequence runs on one device: set it to 1"
        yield Fault(text, (key,))


def frequency_faults(config: AnySFTConfig) -> Iterator[Fault]:
    for name in ("save_freq", "test_freq"):
        value = config.trainer[name]
        if isinstance(value, str) and value != EACH_EPOCH:
            text = f'trainer.{name} is "{value}"; it must be a number of steps or {EACH_EPOCH}'
            yield Fault(text, (f"trainer.{name}",))
    if isinstance(config, SFTEngineConfig) and len(config.trainer.profile_interval) != 2:
        key = "trainer.profile_interval"
        text = f"{key} is {at(config, key)}; it must be [first step, last step]"
        yield Fault(text, (key,))


def lora_faults(config: AnySFTConfig) -> Iterator[Fault]:
    rank = config.model.lora_rank
    if rank and not is_available("peft"):
        text = f'model.lora_rank is {rank}, but peft is not installed; pip install "verl[peft]"'
        yield Fault(text, ("model.lora_rank",), is_about_machine=True)


def resume_faults(config: AnySFTConfig) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        text = (
            f"trainer.resume_from_path is {shown(trainer.resume_from_path)}; with "
            "trainer.resume_mode=resume_path it must name a folder .../global_step_N"
        )
        yield Fault(text, ("trainer.resume_from_path",))


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config
