"""How an asynchronous run corrects for tokens that older policies sampled: one of three choices.

Three policies meet in such a run: pi, which is trained; pi_behave, which sampled (another one per
token where an update came in between); pi_prox, the actor at the start of the training step.

    choice      old_log_probs   loss
    token       pi_behave       any loss on r = pi / pi_behave; its clip bounds each token, or
                                -min(r, C) A log pi
    sequence    pi_behave       -min(prod r, C) A log pi, or rejection of whole sequences
    decoupled   pi_prox         any loss on pi / pi_prox, times min(pi_prox / pi_behave, C)

Log-probs of sampling are never replaced by recomputed ones: old log-probs that the current actor
computed are those of pi_prox, and without a weight for pi_prox / pi_behave the run is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.faults import ConfigError, Fault, shown

PATH = "algorithm.rollout_correction"
USE_SAMPLED = "actor_rollout_ref.actor.use_rollout_log_probs"
COMPUTE_PROXIMAL = "async_training.compute_prox_log_prob"
LOSSES_WITHOUT_RATIO = ("gpg",)

CHOICES = f"""\
  token      {PATH}.bypass_mode=True (or {USE_SAMPLED}=True): the loss clips the ratio of each token
             to the policy that sampled it; with {PATH}.loss_type=reinforce and
             {PATH}.rollout_is=token it is a truncated importance weight
  sequence   {PATH}.bypass_mode=True {PATH}.loss_type=reinforce {PATH}.rollout_is=sequence: one
             truncated weight per sequence; {PATH}.rollout_rs=seq_mean_k1 (and others) with
             {PATH}.rollout_rs_threshold rejects whole sequences
  decoupled  {PATH}.rollout_is=token (or sequence; or {COMPUTE_PROXIMAL}=True): PPO's ratio is to
             the actor before the update, weighted by its ratio to the policy that sampled"""


@dataclass(frozen=True)
class Correction:
    """What a run does about tokens of older policies."""

    anchor: Literal["behaviour", "proximal"]
    """The policy of `old_log_probs`: the one that sampled, or the actor before the update."""

    settings: RolloutCorrectionConfig
    """Weights and rejection; with a behaviour anchor the loss applies them (bypass mode)."""


def correction_of(config: Any) -> Correction | None:
    """The choice that a configuration makes; None where it makes none."""
    settings: RolloutCorrectionConfig = config.algorithm.rollout_correction
    has_weights = settings.rollout_is is not None or settings.rollout_rs is not None
    if settings.bypass_mode:
        is_corrected = settings.loss_type == "ppo_clip" or has_weights
        return Correction("behaviour", settings) if is_corrected else None
    if config.async_training.get("compute_prox_log_prob"):
        if not has_weights:
            settings = RolloutCorrectionConfig.decoupled_token_is(settings.rollout_is_threshold)
        return Correction("proximal", settings)
    if config.actor_rollout_ref.actor.use_rollout_log_probs:
        return Correction("behaviour", settings)
    if has_weights:
        return Correction("proximal", settings)
    if config.async_training.get("use_rollout_log_probs"):
        return Correction("behaviour", settings)
    return None


def uncorrected_faults(config: Any) -> Iterator[Fault]:
    """What keeps an asynchronous run from being corrected for old tokens."""
    settings: RolloutCorrectionConfig = config.algorithm.rollout_correction
    is_proximal = bool(config.async_training.get("compute_prox_log_prob"))
    has_weights = settings.rollout_is is not None or settings.rollout_rs is not None
    choice = correction_of(config)
    if choice is None:
        reason = "none is chosen"
        if settings.bypass_mode:
            reason = f"{PATH}.loss_type=reinforce without rollout_is and rollout_rs is none"
        text = (
            "asynchronous training uses tokens that older policies sampled and needs a correction "
            f"for them, but {reason}; choose one of:\n{CHOICES}"
        )
        yield Fault(text, (f"{PATH}.rollout_is", f"{PATH}.bypass_mode", USE_SAMPLED))
        return
    if settings.bypass_mode and is_proximal:
        text = (
            f"{COMPUTE_PROXIMAL} is True, but {PATH}.bypass_mode takes the log-probs of sampling "
            "instead of computing those of the actor; set one of them to False"
        )
        yield Fault(text, (COMPUTE_PROXIMAL, f"{PATH}.bypass_mode"))
    does_use_sampled = config.actor_rollout_ref.actor.use_rollout_log_probs and not is_proximal
    if not settings.bypass_mode and does_use_sampled and has_weights:
        text = (
            f"{USE_SAMPLED} is True, so the old log-probs are those of sampling, and the weights "
            f"of {PATH}.rollout_is and rollout_rs, which compare the two, would all be 1; set "
            f"{PATH}.bypass_mode=True (the loss compares with the trained policy) or "
            f"{COMPUTE_PROXIMAL}=True (decoupled)"
        )
        yield Fault(text, (USE_SAMPLED, f"{PATH}.rollout_is"))
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    is_replaced = settings.bypass_mode and settings.loss_type == "reinforce"
    if choice.anchor == "behaviour" and loss in LOSSES_WITHOUT_RATIO and not is_replaced:
        key = "actor_rollout_ref.actor.policy_loss.loss_mode"
        text = (
            f"{key} is {shown(loss)}, which has no ratio to the policy that sampled, so nothing "
            f"corrects for old tokens; choose a loss on ratios, or {PATH}.rollout_is=token with "
            "bypass_mode=False"
        )
        yield Fault(text, (key,))


def require_correction(config: Any) -> Correction:
    """The choice of an asynchronous run; raises a ValueError that lists the three without one."""
    faults = list(uncorrected_faults(config))
    choice = correction_of(config)
    if faults or choice is None:
        raise ConfigError(faults)
    return choice
