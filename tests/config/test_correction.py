"""Asynchronous training corrects for tokens of older policies, by one of three choices."""

import pytest

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.correction import correction_of, require_correction
from verl.config.load import load_config
from verl.config.ppo import PPOConfig

PATH = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
SAMPLED = {f"{ACTOR}.use_rollout_log_probs": True}
PROXIMAL = {"async_training.compute_prox_log_prob": True}
OLDER_SAMPLED = {"async_training.use_rollout_log_probs": True}


def config_of(options):
    nested = {}
    for key, value in options.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return load_config(nested, PPOConfig, keeps_unknown=True).config


CHOICES = {
    "token, clipped": ({f"{PATH}.bypass_mode": True}, "behaviour", None),
    "token, clipped, actor key": (SAMPLED, "behaviour", None),
    "token, clipped, older key": (OLDER_SAMPLED, "behaviour", None),
    "token, truncated": (
        {
            f"{PATH}.bypass_mode": True,
            f"{PATH}.loss_type": "reinforce",
            f"{PATH}.rollout_is": "token",
        },
        "behaviour",
        "token",
    ),
    "sequence": (
        {
            f"{PATH}.bypass_mode": True,
            f"{PATH}.loss_type": "reinforce",
            f"{PATH}.rollout_is": "sequence",
        },
        "behaviour",
        "sequence",
    ),
    "sequence, rejected": (
        {f"{PATH}.rollout_rs": "seq_mean_k1", f"{PATH}.rollout_rs_threshold": "0.5_2.0"},
        "proximal",
        None,
    ),
    "decoupled": ({f"{PATH}.rollout_is": "token"}, "proximal", "token"),
    "decoupled, sequence": ({f"{PATH}.rollout_is": "sequence"}, "proximal", "sequence"),
    "decoupled, which the command's default does not override": (
        OLDER_SAMPLED | {f"{PATH}.rollout_is": "token"},
        "proximal",
        "token",
    ),
    "decoupled, older key": (PROXIMAL, "proximal", "token"),
    "decoupled, both older keys": (PROXIMAL | OLDER_SAMPLED, "proximal", "token"),
    "decoupled, older key by sequence": (
        PROXIMAL | {f"{PATH}.rollout_is": "sequence"},
        "proximal",
        "sequence",
    ),
}


@pytest.mark.parametrize(("options", "anchor", "level"), CHOICES.values(), ids=CHOICES)
def test_each_way_to_choose_has_one_meaning(options, anchor, level):
    choice = require_correction(config_of(options))
    assert (choice.anchor, choice.settings.rollout_is) == (anchor, level)


def test_the_older_key_keeps_the_truncation_of_the_section():
    options = PROXIMAL | {f"{PATH}.rollout_is_threshold": 5.0}
    choice = require_correction(config_of(options))
    assert choice.settings == RolloutCorrectionConfig.decoupled_token_is(5.0)


NO_CHOICE = {
    "nothing": {},
    "keys that are off": {f"{PATH}.bypass_mode": False, f"{ACTOR}.use_rollout_log_probs": False},
    "policy gradient without weights": {
        f"{PATH}.bypass_mode": True,
        f"{PATH}.loss_type": "reinforce",
    },
    "a cap without weights": {f"{PATH}.rollout_is_threshold": 3.0},
}


@pytest.mark.parametrize("options", NO_CHOICE.values(), ids=NO_CHOICE)
def test_without_a_choice_the_run_is_refused_and_all_three_are_named(options):
    """Recomputed log-probs are never taken for those of the policy that sampled."""
    config = config_of(options)
    assert correction_of(config) is None
    with pytest.raises(ValueError, match="needs a correction") as refusal:
        require_correction(config)
    for words in ("token ", "sequence ", "decoupled ", "bypass_mode=True", "rollout_is=sequence"):
        assert words in str(refusal.value)
    assert "async_training.compute_prox_log_prob=True" in str(refusal.value)


CONTRADICTIONS = {
    "two anchors": (PROXIMAL | {f"{PATH}.bypass_mode": True}, "bypass_mode takes the log-probs"),
    "weights that are all 1": (SAMPLED | {f"{PATH}.rollout_is": "token"}, "would all be 1"),
    "rejection of nothing": (
        SAMPLED | {f"{PATH}.rollout_rs": "token_k1", f"{PATH}.rollout_rs_threshold": 2.0},
        "would all be 1",
    ),
    "a loss without a ratio": (SAMPLED | {f"{ACTOR}.policy_loss.loss_mode": "gpg"}, "no ratio"),
}


@pytest.mark.parametrize(("options", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_choices_that_cancel_each_other_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        require_correction(config_of(options))


def test_a_loss_without_a_ratio_may_be_weighted():
    options = {f"{PATH}.rollout_is": "token", f"{ACTOR}.policy_loss.loss_mode": "gpg"}
    assert require_correction(config_of(options)).anchor == "proximal"
