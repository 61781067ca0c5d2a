"""Sections of the actor: its policy loss, routes that are replayed, demonstrations in updates."""

from dataclasses import dataclass
from typing import ClassVar

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.base import BaseConfig, When, option, runtime_value
from verl.config.roles import ROUTE_FILES


@dataclass(kw_only=True)
class PolicyLossConfig(BaseConfig):
    """Which policy loss, and the settings of those that have their own."""

    _mutable_fields: ClassVar[set[str]] = {"loss_mode", "rollout_correction", "bypassed_loss_mode"}

    _target_: str = "verl.workers.config.PolicyLossConfig"

    loss_mode: str = "vanilla"
    """Policy loss: `vanilla` (PPO), `gspo`, `sapo`, `gpg`, `clip_cov`, `kl_cov`, `geo_mean`,
    `cispo`, `dppo_tv`, `dppo_kl`, `dro`, on whole sequences `gvpo`, `sppo` and `dpo` (by its
    recipes), or a registered name."""

    clip_cov_ratio: float = option(
        0.0002,
        minimum=0,
        maximum=1,
        used_if=When(
            lambda here, run: here.loss_mode == "clip_cov", "only loss_mode=clip_cov uses it"
        ),
    )
    """`clip_cov`: part of the tokens whose gradient is dropped."""

    clip_cov_lb: float = option(
        1.0,
        used_if=When(
            lambda here, run: here.loss_mode == "clip_cov", "only loss_mode=clip_cov uses it"
        ),
    )
    """`clip_cov`: lowest covariance of a token that may be dropped."""

    clip_cov_ub: float = option(
        5.0,
        used_if=When(
            lambda here, run: here.loss_mode == "clip_cov", "only loss_mode=clip_cov uses it"
        ),
    )
    """`clip_cov`: highest covariance of a token that may be dropped."""

    kl_cov_ratio: float = option(
        0.0002,
        minimum=0,
        maximum=1,
        used_if=When(lambda here, run: here.loss_mode == "kl_cov", "only loss_mode=kl_cov uses it"),
    )
    """`kl_cov`: part of the tokens that get a KL penalty."""

    ppo_kl_coef: float = option(
        0.1,
        minimum=0,
        used_if=When(lambda here, run: here.loss_mode == "kl_cov", "only loss_mode=kl_cov uses it"),
    )
    """`kl_cov`: weight of that penalty."""

    dro_beta: float | None = option(
        None,
        above=0,
        used_if=When(lambda here, run: here.loss_mode == "dro", "only loss_mode=dro uses it"),
    )
    """`dro`: weight of the squared distance to the old policy; 0.05 is usual."""

    gvpo_beta: float = option(
        0.1,
        above=0,
        used_if=When(lambda here, run: here.loss_mode == "gvpo", "only loss_mode=gvpo uses it"),
    )
    """`gvpo`: what the log-ratio is multiplied by before it is compared with rewards; larger stays
    closer to the old policy."""

    rollout_correction: RolloutCorrectionConfig | None = runtime_value(None)
    """Handed over by the trainer when rollout correction bypasses the old policy."""

    bypassed_loss_mode: str = runtime_value("vanilla")
    """The loss that `loss_mode` named before bypass mode took its place; `loss_type=ppo_clip` uses
    it, on the ratio to the policy that sampled."""


@dataclass(kw_only=True)
class RouterReplayConfig(BaseConfig):
    """Replaying the routing of mixture-of-experts layers."""

    _target_: str = "verl.workers.config.RouterReplayConfig"

    mode: str = option("disabled", choices=("disabled", "R2", "R3"))
    """Replay the routing of the old policy (R2) or of the rollout engine (R3) in the update: the
    selected experts are replayed, their weights come from the live router."""

    record_file: str | None = option(None, absent=ROUTE_FILES)
    """File to which routing is recorded."""

    replay_file: str | None = option(None, absent=ROUTE_FILES)
    """File from which routing is replayed."""


REPLAYED = When(lambda here, run: here.files is not None, "sft_replay.files is null")


@dataclass(kw_only=True)
class SFTReplayConfig(BaseConfig):
    """Demonstrations that join the rows of an update, trained by cross-entropy."""

    files: str | list[str] | None = None
    """File or files with prompts and responses, as for supervised fine-tuning. Null: none."""

    rows_per_mini_batch: int = option(1, minimum=1, used_if=REPLAYED)
    """Demonstrations in each optimizer step, beside the sequences of `ppo_mini_batch_size`."""

    coef: float = option(1.0, above=0, used_if=REPLAYED)
    """Factor on their cross-entropy, which is a mean over their response tokens."""

    prompt_key: str = option("prompt", used_if=REPLAYED)
    """Column with the prompt: text, or messages."""

    response_key: str = option("response", used_if=REPLAYED)
    """Column with the response."""

    @property
    def num_rows(self) -> int:
        """Demonstrations in each optimizer step."""
        return 0 if self.files is None else self.rows_per_mini_batch
