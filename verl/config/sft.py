"""Supervised fine-tuning: `sft_trainer.yaml` and the back-end neutral `sft_trainer_engine.yaml`.

`SFTConfig` trains on prompt and response columns with FSDP; `SFTEngineConfig` trains on
conversations with any engine (`engine=megatron optim=megatron`).
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Absent, BaseConfig, When, never, option, while_on
from verl.config.data import CustomClassConfig
from verl.config.engine import (
    DTYPES,
    EngineConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
    WrapPolicyConfig,
)
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.config.profiler import TOOLS, ProfilerConfig
from verl.config.roles import PACKED
from verl.config.trainer import DEVICES, LOCAL_DIR, RESUME_MODES, CheckpointConfig

EACH_EPOCH = "after_each_epoch"
"""A value of `save_freq` and `test_freq`."""


@dataclass(kw_only=True)
class SFTDataBaseConfig(BaseConfig):
    """What both SFT trainers read."""

    train_batch_size: int = option(256, minimum=1)
    """Rows per optimizer step, over all devices."""

    micro_batch_size_per_gpu: int = option(4, minimum=1)
    """Rows per forward and backward pass on one device. It never changes the gradient."""

    train_files: str | list[str] = "~/data/gsm8k/train.parquet"
    """File or files with training rows."""

    train_max_samples: int = option(-1, minimum=-1)
    """Use only this many training rows; -1 uses all."""

    val_max_samples: int = option(-1, minimum=-1)
    """Use only this many validation rows; -1 uses all."""

    max_length: int = option(1024, minimum=1)
    """Most tokens in a row."""

    truncation: str = option("error", choices=("error", "left", "right"))
    """What to do with a longer row: stop with an error, or cut this side."""

    balance_dp_token: bool = option(
        False, used_if=never("the loss is always a mean over all tokens of the global batch")
    )
    """Accepted for older scripts: the loss is always a mean over all tokens of the global batch."""

    apply_chat_template_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for `apply_chat_template`."""

    use_shm: bool = False
    """Copy the files to shared memory first."""

    custom_cls: CustomClassConfig = option(default_factory=CustomClassConfig)
    """A dataset class of your own."""


@dataclass(kw_only=True)
class MultiturnDataConfig(BaseConfig):
    """Conversations instead of prompt and response columns."""

    enable: bool = False
    """Train on conversations, with a loss on every assistant turn."""

    messages_key: str = "messages"
    """Column with the messages."""

    tools_key: str = "tools"
    """Column with the tools offered in the conversation."""

    enable_thinking_key: str = "enable_thinking"
    """Column that switches thinking on."""


@dataclass(kw_only=True)
class SFTDataConfig(SFTDataBaseConfig):
    """Rows with a prompt and a response."""

    micro_batch_size: int | None = option(None, minimum=1)
    """Deprecated: the same as `micro_batch_size_per_gpu`, but counted over all devices."""

    val_files: str | list[str] | None = "~/data/gsm8k/test.parquet"
    """File or files with validation rows; null validates nothing."""

    prompt_key: str | list[str] = "question"
    """Column with the prompt: a plain or already templated string."""

    response_key: str | list[str] = "answer"
    """Column with the response."""

    prompt_dict_keys: list[str] | None = None
    """Keys that lead to the prompt inside a dict column."""

    response_dict_keys: list[str] | None = None
    """Keys that lead to the response inside a dict column."""

    multiturn: MultiturnDataConfig = option(
        default_factory=MultiturnDataConfig,
        used_if=When(lambda here, run: here.multiturn.enable, "multiturn.enable is off"),
    )
    """Conversations instead of prompt and response columns."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: `chatml`, or Jinja text."""


@dataclass(kw_only=True)
class SFTEngineDataConfig(SFTDataBaseConfig):
    """Rows with a conversation."""

    val_files: str | list[str] | None = None
    """File or files with validation rows; null validates nothing."""

    use_dynamic_bsz: bool = True
    """Cut micro-batches by tokens instead of by rows."""

    max_token_len_per_gpu: int = option(8192, minimum=1, used_if=while_on("use_dynamic_bsz"))
    """Tokens per micro-batch on one device when `use_dynamic_bsz` is on."""

    messages_key: str = "messages"
    """Column with the messages."""

    tools_key: str = "tools"
    """Column with the tools offered in the conversation."""

    enable_thinking_key: str = "enable_thinking"
    """Column that switches thinking on."""

    image_key: str = "images"
    """Column with images; `<image>` in the messages marks where each belongs."""

    mm_processor_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for the model's image processor, for example `size`."""

    pad_mode: str = option("no_padding", choices=("no_padding", "right"))
    """Keep rows at their own length, or pad them to `max_length`."""

    ignore_input_ids_mismatch: bool = False
    """Accept a template that gives other tokens turn by turn than for the whole conversation."""


@dataclass(kw_only=True)
class SFTFSDPConfig(BaseConfig):
    """How the model is spread over devices."""

    model_dtype: str = option("fp32", choices=DTYPES)
    """Number format of the weights. With fp32 the optimizer's copy is meant: passes run in bfloat16
    where the device has it."""

    wrap_policy: WrapPolicyConfig = option(default_factory=WrapPolicyConfig)
    """Which modules become a unit of sharding."""

    cpu_offload: bool = option(
        False, absent=Absent("weights and optimizer stay on the device: leave it out")
    )
    """Let FSDP keep gradients and optimizer state in CPU memory."""

    offload_params: bool = option(
        False, absent=Absent("weights and optimizer stay on the device: leave it out")
    )
    """With `cpu_offload`, keep the weights there as well."""


@dataclass(kw_only=True)
class SFTModelConfig(BaseConfig):
    """The model that is fine-tuned."""

    partial_pretrain: str = "~/models/gemma-1.1-7b-it"
    """Hugging Face name or folder of the weights to start from. `model.path` means the same."""

    strategy: str = option(
        "fsdp2", choices=("fsdp", "fsdp2"), used_if=never("fsdp and fsdp2 mean the same")
    )
    """Training back-end; both names mean FSDP2."""

    fsdp_config: SFTFSDPConfig = option(default_factory=SFTFSDPConfig)
    """How the model is spread over devices."""

    use_shm: bool = False
    """Copy the weights to shared memory first, so that many processes read them faster."""

    external_lib: str | list[str] | None = None
    """Modules to import before the model is loaded, for example to register its class."""

    enable_gradient_checkpointing: bool = True
    """Compute activations again in the backward pass: less memory, about a third more compute."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""

    lora_rank: int = option(0, minimum=0)
    """Rank of LoRA adapters; 0 trains all weights."""

    lora_alpha: int = option(
        16, minimum=0, used_if=When(lambda here, run: here.lora_rank > 0, "no LoRA: lora_rank is 0")
    )
    """Adapters are scaled by `lora_alpha / lora_rank`."""

    target_modules: str | list[str] = option(
        "all-linear", used_if=When(lambda here, run: here.lora_rank > 0, "no LoRA: lora_rank is 0")
    )
    """Layers that get an adapter: names, a regular expression, or `all-linear`."""

    use_liger: bool = option(False, used_if=never("our own kernels take its place"))
    """Replace layers by Liger kernels."""


@dataclass(kw_only=True)
class SFTOptimizerConfig(FSDPOptimizerConfig):
    """The optimizer of `sft_trainer.yaml`."""

    _target_: str = ""

    lr: float = option(1e-5, minimum=0)

    lr_warmup_steps_ratio: float = option(0.1, minimum=0, maximum=1)

    betas: list[float] = option(default_factory=lambda: [0.9, 0.95])

    lr_scheduler: str = option("cosine", choices=("constant", "cosine", "wsd"))
    """Shape of the learning rate after warm-up; it decides, whatever `lr_scheduler_type` says."""


@dataclass(kw_only=True)
class SFTTrainerBaseConfig(BaseConfig):
    """What both SFT trainers have."""

    project_name: str = "gsm8k-sft"
    """Project under which the run is reported and saved."""

    experiment_name: str = "test"
    """Name of the run."""

    total_epochs: int = option(
        4,
        minimum=0,
        used_if=When(
            lambda here, run: here.total_training_steps is None, "total_training_steps decides"
        ),
    )
    """Passes over the training data."""

    total_training_steps: int | None = option(None, minimum=0)
    """Optimizer steps; null takes what `total_epochs` gives."""

    logger: list[str] = option(default_factory=lambda: ["console"])
    """Where metrics go: `console`, `wandb`, `tensorboard`, `mlflow`, `swanlab`, `clearml`,
    `trackio`, `file`, ..."""

    seed: int = option(1, minimum=0)
    """Seed of weights and data order."""

    device: str = option("auto", choices=DEVICES)
    """Device to run on; `auto` takes a GPU or NPU if there is one."""

    nnodes: int = option(1, minimum=1)
    """Machines. Under `torchrun` its own arguments decide."""

    dry_run: bool = False
    """Check the configuration, print the plan and stop."""

    default_local_dir: str = option("checkpoints/gsm8k-sft/test", yaml=LOCAL_DIR)
    """Folder for checkpoints."""

    default_hdfs_dir: str | None = option(
        None, absent=Absent("checkpoints are written to a local folder: leave it out")
    )
    """Remote folder to which checkpoints are copied."""

    max_ckpt_to_keep: int | None = option(None, minimum=0)
    """Newest checkpoints to keep; null or 0 keeps all."""

    resume_mode: str = option("auto", choices=RESUME_MODES)
    """Continue from the newest checkpoint (`auto`), never (`disable`), or from `resume_from_path`
    (`resume_path`)."""

    resume_from_path: str | None = option(
        None,
        used_if=When(
            lambda here, run: here.resume_mode == "resume_path", "resume_mode is not resume_path"
        ),
    )
    """Checkpoint folder, `.../global_step_N`, to continue from."""

    resume_may_change: list[str] = option(
        default_factory=list,
        used_if=When(lambda here, run: here.resume_mode != "disable", "resume_mode is disable"),
    )
    """Differences from the checkpoint to accept: `code`, `weights`, `data`, patterns of options."""


@dataclass(kw_only=True)
class SFTTrainerConfig(SFTTrainerBaseConfig):
    """One run of `fsdp_sft_trainer`."""

    n_gpus_per_node: int = option(8, minimum=1)
    """Devices per machine. Under `torchrun` its own arguments decide."""

    save_freq: int = option(-1, minimum=-1)
    """Optimizer steps between checkpoints; -1 saves only the last."""

    test_freq: int = option(-1, minimum=-1)
    """Optimizer steps between validations; -1 validates only at the end."""

    checkpoint: CheckpointConfig = option(default_factory=CheckpointConfig)
    """Contents of checkpoints."""


@dataclass(kw_only=True)
class SFTEngineTrainerConfig(SFTTrainerBaseConfig):
    """One run of `sft_trainer` or `sft_trainer_ray`."""

    n_gpus_per_node: int = option(1, minimum=1)
    """Devices per machine. Under `torchrun` its own arguments decide."""

    save_freq: int | str = option(-1, minimum=-1)
    """Optimizer steps between checkpoints, or `after_each_epoch`; -1 saves only the last."""

    test_freq: int | str = option(-1, minimum=-1)
    """Optimizer steps between validations, or `after_each_epoch`; -1 validates only at the end."""

    profile_interval: list[int] = option(default_factory=lambda: [-1, -1])
    """First and last step to profile; -1 profiles none."""


@dataclass(kw_only=True)
class SFTProfilerConfig(ProfilerConfig):
    """Profiling of SFT."""

    tool: str | None = option("torch", choices=TOOLS)

    save_path: str | None = "outputs/profile"


@dataclass(kw_only=True)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning with FSDP, or on one device."""

    data: SFTDataConfig = option(default_factory=SFTDataConfig)
    """Rows with a prompt and a response."""

    model: SFTModelConfig = option(default_factory=SFTModelConfig)
    """The model that is fine-tuned."""

    optim: SFTOptimizerConfig = option(default_factory=SFTOptimizerConfig)
    """The optimizer."""

    ulysses_sequence_parallel_size: int = option(1, minimum=1)
    """Devices that share one sequence, for long contexts. Needs `use_remove_padding`."""

    use_remove_padding: bool = option(False, used_if=never(PACKED.reason))
    """Pack rows without padding, so that no compute is spent on pad tokens."""

    trainer: SFTTrainerConfig = option(default_factory=SFTTrainerConfig)
    """How long, on what, how often it saves, and where it reports."""


ON_MEGATRON = When(
    lambda here, run: isinstance(here.engine, McoreEngineConfig), "the engine is not Megatron"
)


@dataclass(kw_only=True)
class SFTEngineConfig(BaseConfig):
    """Supervised fine-tuning with any training back-end."""

    data: SFTEngineDataConfig = option(default_factory=SFTEngineDataConfig)
    """Rows with a conversation."""

    model: HFModelConfig = option(default_factory=HFModelConfig)
    """The model that is fine-tuned."""

    engine: EngineConfig = option(
        default_factory=FSDPEngineConfig,
        reads=("dtype", "strategy", "ulysses_sequence_parallel_size"),
        unread="each rank holds the whole model",
        reads_all_if=ON_MEGATRON,
    )
    """Training back-end: choose another with `engine=megatron` or `engine=veomni`."""

    optim: OptimizerConfig = option(default_factory=FSDPOptimizerConfig)
    """The optimizer: choose another with `optim=megatron` or `optim=veomni`."""

    checkpoint: CheckpointConfig = option(default_factory=CheckpointConfig)
    """Contents of checkpoints."""

    profiler: ProfilerConfig = option(default_factory=SFTProfilerConfig)
    """Profiling."""

    trainer: SFTEngineTrainerConfig = option(default_factory=SFTEngineTrainerConfig)
    """How long, on what, how often it saves, and where it reports."""
