"""What a supervised run would do, for `trainer.dry_run`. Read from the options alone."""

from verl.config.roles import world_size
from verl.config.sft import SFTConfig, SFTEngineConfig


def plan(config: SFTConfig | SFTEngineConfig) -> str:
    """A line for each thing one wants to know before starting."""
    data, trainer = config.data, config.trainer
    steps = trainer.total_training_steps
    length = f"{steps} steps" if steps is not None else f"{trainer.total_epochs} epochs"
    lines = {
        "model": model_of(config),
        "trained": trained_of(config),
        "data": f"{data.train_files}: {columns_of(config)}",
        "batch": f"{data.train_batch_size} rows, {micro_batch_of(config)} at a time",
        "ranks": str(world_size(config)),
        "length": f"{length}, at most {data.max_length} tokens a row",
        "optimizer": f"lr {config.optim.lr:g}, {schedule_of(config)}",
        "checkpoints": trainer.default_local_dir,
    }
    return "\n".join(f"{name:12}{value}" for name, value in lines.items())


def model_of(config: SFTConfig | SFTEngineConfig) -> str:
    is_engine = isinstance(config, SFTEngineConfig)
    return config.model.path if is_engine else config.model.partial_pretrain


def trained_of(config: SFTConfig | SFTEngineConfig) -> str:
    rank = config.model.lora_rank
    if isinstance(config, SFTEngineConfig):
        rank = rank or config.model.lora.rank
        if config.model.lora_adapter_path is not None:
            return f"the LoRA adapter in {config.model.lora_adapter_path}"
    return f"LoRA adapters of rank {rank}" if rank else "all weights"


def columns_of(config: SFTConfig | SFTEngineConfig) -> str:
    if isinstance(config, SFTEngineConfig):
        return f"conversations in {config.data.messages_key}"
    if config.data.multiturn.enable:
        return f"conversations in {config.data.multiturn.messages_key}"
    return f"{config.data.prompt_key} -> {config.data.response_key}"


def micro_batch_of(config: SFTConfig | SFTEngineConfig) -> str:
    if isinstance(config, SFTEngineConfig) and config.data.use_dynamic_bsz:
        return f"{config.data.max_token_len_per_gpu} tokens"
    return f"{config.data.micro_batch_size_per_gpu} rows"


def schedule_of(config: SFTConfig | SFTEngineConfig) -> str:
    is_engine = isinstance(config, SFTEngineConfig)
    return config.optim["lr_scheduler_type"] if is_engine else config.optim.lr_scheduler
