"""Training a reward model on pairs of responses: `rm_trainer.yaml`.

The run is that of supervised fine-tuning with another dataset and another loss, so the sections
are those of `sft_trainer_engine.yaml` but for the data and the objective.
"""

# Sections are frozen, so a variant may narrow the type of a section it inherits.
# pyright: reportIncompatibleVariableOverride=false

from dataclasses import dataclass

from verl.config.base import BaseConfig, When, option
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.sft import SFTDataBaseConfig, SFTEngineConfig, SFTEngineTrainerConfig
from verl.config.trainer import LOCAL_DIR

IMPLICIT = When(
    lambda here, run: here.name == "implicit", "only objective.name=implicit uses a reference"
)


@dataclass(kw_only=True)
class RMDataConfig(SFTDataBaseConfig):
    """Pairs of responses to the same prompt."""

    train_batch_size: int = option(64, minimum=1)
    """Pairs per optimizer step, over all devices."""

    micro_batch_size_per_gpu: int = option(4, minimum=1)
    """Pairs per forward and backward pass on one device. It never changes the gradient."""

    train_files: str | list[str] = "~/data/full_hh_rlhf/rm/train.parquet"
    """File or files with training pairs."""

    val_files: str | list[str] | None = None
    """File or files with validation pairs; null validates nothing."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or messages. Not needed where both sides are whole
    conversations."""

    chosen_key: str = "chosen"
    """Column with the better response: a text, the assistant's message, or a conversation that ends
    with it."""

    rejected_key: str = "rejected"
    """Column with the other response, in the same form."""


@dataclass(kw_only=True)
class ObjectiveConfig(BaseConfig):
    """What the model learns from a pair."""

    name: str = option("bradley_terry", choices=("bradley_terry", "implicit"))
    """`bradley_terry` trains a head that scores a text, for `reward_model.model.path` of any run;
    `implicit` a language model whose log-ratio to a reference rewards tokens, for PRIME."""

    beta_train: float = option(0.05, above=0, used_if=IMPLICIT)
    """A response's logit is beta times the sum of its log-ratios."""

    ref_path: str | None = option(None, used_if=IMPLICIT)
    """The frozen reference; null takes `model.path`."""


@dataclass(kw_only=True)
class RMOptimizerConfig(FSDPOptimizerConfig):
    """The optimizer of a reward model."""

    lr: float = option(1e-5, minimum=0)

    lr_warmup_steps_ratio: float = option(
        0.05,
        minimum=0,
        maximum=1,
        used_if=When(lambda here, run: here.lr_warmup_steps < 0, "lr_warmup_steps decides"),
    )

    lr_scheduler_type: str = option("cosine", choices=("constant", "linear", "cosine"))


@dataclass(kw_only=True)
class RMTrainerConfig(SFTEngineTrainerConfig):
    """One run of `main_rm`."""

    project_name: str = "reward-model"
    """Project under which the run is reported and saved."""

    total_epochs: int = option(
        1,
        minimum=0,
        used_if=When(
            lambda here, run: here.total_training_steps is None, "total_training_steps decides"
        ),
    )

    default_local_dir: str = option("checkpoints/reward-model/test", yaml=LOCAL_DIR)
    """Folder for checkpoints."""


@dataclass(kw_only=True)
class RMConfig(SFTEngineConfig):
    """Training of a reward model on pairs."""

    data: RMDataConfig = option(default_factory=RMDataConfig)
    """Pairs of responses to the same prompt."""

    objective: ObjectiveConfig = option(default_factory=ObjectiveConfig)
    """What the model learns from a pair."""

    optim: FSDPOptimizerConfig = option(default_factory=RMOptimizerConfig)
    """The optimizer."""

    trainer: RMTrainerConfig = option(default_factory=RMTrainerConfig)
    """How long, on what, how often it saves, and where it reports."""
