"""What a supervised run does, under one name for each option.

`sft_trainer.yaml` and `sft_trainer_engine.yaml` say the same things in different places. Here they
become one `SFTSettings`, which is all that the loop and its parts read. Only options that have an
effect are looked at, so that the others are reported as unused at the end of a run.
"""

from dataclasses import dataclass

from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.sft import (
    EACH_EPOCH,
    SFTConfig,
    SFTDataConfig,
    SFTEngineConfig,
    SFTEngineDataConfig,
    SFTEngineTrainerConfig,
    SFTModelConfig,
    SFTTrainerConfig,
)
from verl.config.trainer import CheckpointConfig
from verl.models.lora import LoraOptions, lora_options
from verl.workers.engine.base import MicroBatching

AnySFTConfig = SFTConfig | SFTEngineConfig


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    model: HFModelConfig
    lora: LoraOptions | None
    dtype: str
    """Number format of the passes; the optimizer keeps fp32 whatever it is."""

    optim: FSDPOptimizerConfig
    schedule: str
    """`constant`, `linear`, `cosine` or `wsd`."""

    data: SFTDataConfig | SFTEngineDataConfig
    """As written; what a dataset class of one's own is given."""

    conversations: SFTEngineDataConfig | None
    """How to read conversations; None for prompt and response columns."""

    micro_batching: MicroBatching
    trainer: SFTTrainerConfig | SFTEngineTrainerConfig
    checkpoint: CheckpointConfig
    profiler: ProfilerConfig | None
    profile_interval: tuple[int, int]


def settings_of(config: AnySFTConfig) -> SFTSettings:
    return _of_engine(config) if isinstance(config, SFTEngineConfig) else _of_fsdp(config)


def _of_fsdp(config: SFTConfig) -> SFTSettings:
    model = _as_hf_model(config.model, config.data.chat_template)
    weights = config.model.fsdp_config.model_dtype
    return SFTSettings(
        model=model,
        lora=lora_options(model),
        # fp32 weights mean fp32 masters; passes then run in the device's own format, as FSDP's do.
        dtype="auto" if weights in ("fp32", "float32") else weights,
        optim=config.optim,
        schedule=config.optim.lr_scheduler,
        data=config.data,
        conversations=_as_conversations(config.data) if config.data.multiturn.enable else None,
        micro_batching=MicroBatching(rows=config.data.micro_batch_size_per_gpu),
        trainer=config.trainer,
        checkpoint=config.trainer.checkpoint,
        profiler=None,
        profile_interval=(-1, -1),
    )


def _of_engine(config: SFTEngineConfig) -> SFTSettings:
    data, engine, optim = config.data, config.engine, config.optim
    assert isinstance(engine, FSDPEngineConfig)  # `launch.unsupported` has refused others
    assert isinstance(optim, FSDPOptimizerConfig)
    by_tokens = data.use_dynamic_bsz
    first, last = config.trainer.profile_interval
    return SFTSettings(
        model=config.model,
        lora=lora_options(config.model),
        dtype=engine.dtype,
        optim=optim,
        schedule=optim.lr_scheduler_type,
        data=data,
        conversations=data,
        micro_batching=(
            MicroBatching(tokens=data.max_token_len_per_gpu)
            if by_tokens
            else MicroBatching(rows=data.micro_batch_size_per_gpu)
        ),
        trainer=config.trainer,
        checkpoint=config.checkpoint,
        profiler=config.profiler,
        profile_interval=(first, last),
    )


def _as_hf_model(model: SFTModelConfig, chat_template: str | None) -> HFModelConfig:
    return HFModelConfig(
        path=model.partial_pretrain,
        use_shm=model.use_shm,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=chat_template,
        external_lib=model.external_lib,
        enable_gradient_checkpointing=model.enable_gradient_checkpointing,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha if model.lora_rank else 16,
        target_modules=model.target_modules if model.lora_rank else "all-linear",
    )


def _as_conversations(data: SFTDataConfig) -> SFTEngineDataConfig:
    turns = data.multiturn
    return SFTEngineDataConfig(
        messages_key=turns.messages_key,
        tools_key=turns.tools_key,
        enable_thinking_key=turns.enable_thinking_key,
        max_length=data.max_length,
        truncation=data.truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        use_shm=data.use_shm,
    )


def steps_between(frequency: int | str, steps_per_epoch: int) -> int:
    """`trainer.save_freq` or `test_freq` in steps; -1 waits for the last one."""
    return steps_per_epoch if frequency == EACH_EPOCH else int(frequency)
