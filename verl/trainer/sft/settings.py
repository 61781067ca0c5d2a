"""What a supervised run does, under one name for each option, and the parts built from it.

`sft_trainer.yaml` and `sft_trainer_engine.yaml` say the same things in different places. Here they
become one `SFTSettings`, which is all that the loop, the tokenizer, the datasets and the engine
are made from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.convert import omega_conf_to_dataclass
from verl.config.data import CustomClassConfig
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.rm import RMDataConfig
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
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.models.lora import LoraOptions, add_lora, lora_options
from verl.trainer.sft.batches import Ranks, Row
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.prompts import set_chat_template
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.device import resolve_device
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs, load_extern_object
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.torch_functional import get_wsd_schedule_with_warmup
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.registry import EngineRegistry
from verl.workers.engine.spec import EngineSpec, compute_dtype
from verl.workers.engine.stepping import SteppingEngine
from verl.workers.engine.zero1 import ReplicatedEngine

AnySFTConfig = SFTConfig | SFTEngineConfig
Load = Callable[..., PreTrainedModel]
"""A function of `verl.models.loading`."""


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    model: HFModelConfig
    lora: LoraOptions | None
    dtype: str
    """Number format of the passes; the optimizer keeps fp32 whatever it is."""

    optim: FSDPOptimizerConfig | McoreOptimizerConfig
    schedule: str
    """`constant`, `linear`, `cosine` or `wsd`; Megatron's optimizer has its own."""

    megatron: McoreEngineConfig | None
    """How Megatron divides the model; None: every rank has all of it."""

    data: SFTDataConfig | SFTEngineDataConfig | RMDataConfig
    """The section as written, for a custom dataset class."""

    conversations: SFTEngineDataConfig | None
    """How to read conversations; None for prompt and response columns."""

    micro_batching: MicroBatching
    """Of pairs, where the data is that: both rows of a pair run together."""

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
        megatron=None,
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
    megatron = engine if isinstance(engine, McoreEngineConfig) else None
    assert megatron or isinstance(engine, FSDPEngineConfig)  # `launch.unsupported` refuses others
    assert isinstance(optim, McoreOptimizerConfig if megatron else FSDPOptimizerConfig)
    has_pairs = isinstance(data, RMDataConfig)
    by_tokens = not has_pairs and data.use_dynamic_bsz
    context = 1 if megatron is None else megatron.context_parallel_size
    first, last = config.trainer.profile_interval
    return SFTSettings(
        model=config.model,
        lora=lora_options(config.model),
        dtype=engine.dtype,
        optim=optim,
        schedule=schedule_name(optim),
        megatron=megatron,
        data=data,
        conversations=None if has_pairs else data,
        micro_batching=(
            MicroBatching(tokens=data.max_token_len_per_gpu * context)
            if by_tokens and not has_pairs
            else MicroBatching(rows=data.micro_batch_size_per_gpu)
        ),
        trainer=config.trainer,
        checkpoint=config.checkpoint,
        profiler=config.profiler,
        profile_interval=(first, last),
    )


def schedule_name(optim: FSDPOptimizerConfig | McoreOptimizerConfig) -> str:
    is_megatron = isinstance(optim, McoreOptimizerConfig)
    return optim.lr_decay_style if is_megatron else optim.lr_scheduler_type


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


def build_tokenizer(settings: SFTSettings) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template that the configuration asks for."""
    model = settings.model
    import_external_libs(model.external_lib)
    path = local_path(model.tokenizer_path or model.path, use_shm=model.use_shm)
    tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
    set_chat_template(tokenizer, model.custom_chat_template)
    return tokenizer


def build_datasets(
    settings: SFTSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset[Row], Dataset[Row] | None]:
    """The training rows, and the validation rows if `data.val_files` names any."""
    data = settings.data
    train = build_dataset(settings, data.train_files, tokenizer, data.train_max_samples)
    if not data.val_files:
        return train, None
    return train, build_dataset(settings, data.val_files, tokenizer, data.val_max_samples)


def build_dataset(
    settings: SFTSettings,
    files: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
) -> Dataset[Row]:
    """Prompt and response, conversations, or the class that `data.custom_cls` names."""
    if settings.data.custom_cls.path is not None:
        cls = custom_class(settings.data.custom_cls)
        return cls(files, tokenizer, settings.data, max_samples=max_samples)
    if isinstance(settings.data, RMDataConfig):
        return build_pairs(settings.data, files, tokenizer, max_samples)
    if settings.conversations is not None:
        return MultiTurnSFTDataset(
            files,
            tokenizer,
            settings.conversations,
            build_processor(settings),
            max_samples=max_samples,
        )
    dataset = SFTDataset(files, tokenizer, settings.data, max_samples=max_samples)
    dataset.check_lengths()
    return dataset


def build_processor(settings: SFTSettings) -> Any:
    """What turns images into the model's inputs; None for a model of text."""
    model = settings.model
    path = local_path(model.path, use_shm=model.use_shm)
    return hf_processor(path, trust_remote_code=model.trust_remote_code)


def build_pairs(
    data: RMDataConfig,
    files: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
) -> RMDataset:
    pairs = RMDataset(
        files,
        tokenizer,
        data.prompt_key,
        data.chosen_key,
        data.rejected_key,
        data.max_length,
        max_samples=max_samples,
        truncation=data.truncation,
        use_shm=data.use_shm,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    pairs.check_lengths()
    return pairs


def create_sft_dataset(
    data_paths: str | list[str], data_config: Any, tokenizer: Any, max_samples: int = -1
) -> Dataset[Row]:
    """The rows that a data section describes, for programs with a loop of their own."""
    data = omega_conf_to_dataclass(data_config, SFTDataConfig)
    if data.custom_cls.path is not None:
        return custom_class(data.custom_cls)(data_paths, tokenizer, data, max_samples=max_samples)
    if data.multiturn.enable:
        return MultiTurnSFTDataset(data_paths, tokenizer, data, max_samples=max_samples)
    return SFTDataset(data_paths, tokenizer, data, max_samples=max_samples)


def custom_class(custom: CustomClassConfig) -> Callable[..., Dataset[Row]]:
    assert custom.path is not None
    cls = load_extern_object(custom.path, custom.name or "")
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ValueError(
            f"data.custom_cls is {custom.name!r} in {custom.path}; it must be a subclass of "
            "torch.utils.data.Dataset"
        )
    return cls


def ranks_of(config: SFTConfig | SFTEngineConfig) -> Ranks:
    """This rank among those of the run, and which of them hold the same rows."""
    if not isinstance(config, SFTEngineConfig):
        return Ranks.here(config.ulysses_sequence_parallel_size)
    engine = config.engine
    if isinstance(engine, McoreEngineConfig):
        return Ranks.here(megatron=engine)
    assert isinstance(engine, FSDPEngineConfig), "`launch.unsupported` refuses others"
    return Ranks.here(engine.ulysses_sequence_parallel_size)


def build_engine(
    settings: SFTSettings,
    ranks: Ranks,
    *,
    total_steps: int,
    load: Load = load_causal_lm,
    is_value_model: bool = False,
) -> SteppingEngine:
    """The model with its optimizer, loaded; the same on every rank, or this rank's part of it."""
    optim = settings.optim
    if isinstance(optim, McoreOptimizerConfig):
        return build_megatron_engine(settings, optim, total_steps)
    shared: dict[str, Any] = {"sequence_group": ranks.sequence_group()} if ranks.size > 1 else {}
    engine = (ReplicatedEngine if ranks.size > 1 else OneDeviceEngine)(
        partial(load_model, settings, load),
        engine_optimizer(settings, optim, total_steps),
        max_grad_norm=optim.grad_clip or optim.clip_grad,
        gradient_checkpointing=settings.model.enable_gradient_checkpointing,
        is_value_model=is_value_model,
        **shared,
    )
    engine.initialize()
    if settings.schedule == "wsd":
        assert engine.optimizer is not None
        engine.optimizer.schedule = get_wsd_schedule_with_warmup(
            engine.optimizer.optimizer,
            warmup_steps(optim, total_steps),
            total_steps,
            min_lr_ratio=optim.min_lr_ratio or 0.0,
            num_cycles=optim.num_cycles,
        )
    return engine


def build_megatron_engine(
    settings: SFTSettings, optim: McoreOptimizerConfig, total_steps: int
) -> SteppingEngine:
    model, section = settings.model, settings.megatron
    engine = EngineRegistry.new(
        EngineSpec(
            model=model,
            path=local_path(model.path, use_shm=model.use_shm),
            engine=section,  # pyright: ignore[reportArgumentType]
            optimizer=replace(optim, total_training_steps=total_steps),  # pyright: ignore[reportArgumentType]
            device=resolve_device(settings.trainer.device),
            backend="megatron",
            max_grad_norm=optim.grad_clip or optim.clip_grad,
            gradient_checkpointing=model.enable_gradient_checkpointing,
        )
    )
    assert isinstance(engine, SteppingEngine)
    return engine


def load_model(
    settings: SFTSettings, load: Load = load_causal_lm, path: str | None = None
) -> PreTrainedModel:
    """The weights to start from, with adapters if LoRA is asked for; `path` names others."""
    model = settings.model
    device = resolve_device(settings.trainer.device)
    loaded = load(
        local_path(path or model.path, use_shm=model.use_shm),
        dtype=compute_dtype(settings.dtype, device),
        device=device,
        override_config=dict(model.override_config),
        trust_remote_code=model.trust_remote_code,
    )
    fuse_model(loaded)  # on a GPU; elsewhere it changes nothing
    if settings.lora is None:
        return loaded
    return add_lora(loaded, settings.lora, seed=settings.trainer.seed)


def engine_optimizer(
    settings: SFTSettings, optim: FSDPOptimizerConfig, total_steps: int
) -> FSDPOptimizerConfig:
    """The engine's own section; warm-up, stay, decay is put in its place afterwards."""
    return FSDPOptimizerConfig(
        optimizer=optim.optimizer,
        optimizer_impl=optim.optimizer_impl,
        lr=optim.lr,
        betas=list(optim.betas),
        weight_decay=optim.weight_decay,
        lr_warmup_steps=warmup_steps(optim, total_steps),
        total_training_steps=total_steps,
        lr_scheduler_type="constant" if settings.schedule == "wsd" else settings.schedule,
        min_lr_ratio=optim.min_lr_ratio or 0.0,
        num_cycles=optim.num_cycles,
        override_optimizer_config=optim.override_optimizer_config,
    )


def warmup_steps(optim: FSDPOptimizerConfig, total_steps: int) -> int:
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * total_steps)


def local_path(name: str, *, use_shm: bool) -> str:
    """A local folder, or a name on a hub as it is."""
    local = copy_to_local(name, use_shm=use_shm)
    return str(Path(local).expanduser()) if local.startswith("~") else local
