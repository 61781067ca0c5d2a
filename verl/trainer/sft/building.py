"""From the options of a supervised run to its tokenizer, datasets and engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.sft import SFTConfig, SFTModelConfig, SFTOptimizerConfig
from verl.models.loading import load_causal_lm
from verl.trainer.sft.batches import Row
from verl.utils.dataset.prompts import set_chat_template
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.device import resolve_device
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs, load_extern_object
from verl.utils.schedules import get_wsd_schedule_with_warmup
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.roles.building import compute_dtype


def build_tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template that `data.chat_template` asks for."""
    model = config.model
    import_external_libs(model.external_lib)
    tokenizer = hf_tokenizer(model_path(model), trust_remote_code=model.trust_remote_code)
    set_chat_template(tokenizer, config.data.chat_template)
    return tokenizer


def build_datasets(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset[Row], Dataset[Row] | None]:
    """The training rows, and the validation rows if `data.val_files` names any."""
    data = config.data
    train = build_dataset(config, data.train_files, tokenizer, data.train_max_samples)
    if not data.val_files:
        return train, None
    return train, build_dataset(config, data.val_files, tokenizer, data.val_max_samples)


def build_dataset(
    config: SFTConfig,
    files: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
) -> Dataset[Row]:
    dataset = dataset_class(config)(files, tokenizer, config.data, max_samples=max_samples)
    if isinstance(dataset, SFTDataset):
        dataset.check_lengths()
    return dataset


def dataset_class(config: SFTConfig) -> Callable[..., Dataset[Row]]:
    """`SFTDataset`, or the class that `data.custom_cls` names."""
    custom = config.data.custom_cls
    if custom.path is None:
        return SFTDataset
    cls = load_extern_object(custom.path, custom.name or "")
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ValueError(
            f"data.custom_cls is {custom.name!r} in {custom.path}; it must be a subclass of "
            "torch.utils.data.Dataset"
        )
    return cls


def build_engine(config: SFTConfig, *, total_steps: int) -> OneDeviceEngine:
    """The model with its optimizer, loaded."""
    model, optim = config.model, config.optim
    device = resolve_device(config.trainer.device)
    engine = OneDeviceEngine(
        partial(
            load_causal_lm,
            model_path(model),
            dtype=compute_dtype(model.fsdp_config.model_dtype, device),
            device=device,
            trust_remote_code=model.trust_remote_code,
        ),
        engine_optimizer(optim, total_steps),
        max_grad_norm=optim.grad_clip or optim.clip_grad,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )
    engine.initialize()
    if optim.lr_scheduler == "wsd":
        assert engine.optimizer is not None
        engine.optimizer.schedule = get_wsd_schedule_with_warmup(
            engine.optimizer.optimizer,
            warmup_steps(optim, total_steps),
            total_steps,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
        )
    return engine


def engine_optimizer(optim: SFTOptimizerConfig, total_steps: int) -> FSDPOptimizerConfig:
    """The engine's own section; warm-up, stay, decay is put in its place afterwards."""
    return FSDPOptimizerConfig(
        optimizer=optim.optimizer,
        optimizer_impl=optim.optimizer_impl,
        lr=optim.lr,
        betas=list(optim.betas),
        weight_decay=optim.weight_decay,
        lr_warmup_steps=warmup_steps(optim, total_steps),
        total_training_steps=total_steps,
        lr_scheduler_type="constant" if optim.lr_scheduler == "wsd" else optim.lr_scheduler,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        override_optimizer_config=optim.override_optimizer_config,
    )


def warmup_steps(optim: SFTOptimizerConfig, total_steps: int) -> int:
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * total_steps)


def model_path(model: SFTModelConfig) -> str:
    """A local folder, or a name on a hub as it is."""
    local = copy_to_local(model.partial_pretrain, use_shm=model.use_shm)
    return str(Path(local).expanduser()) if local.startswith("~") else local
