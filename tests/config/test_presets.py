"""The named combinations of importance weights and rejection have the values they are known by."""

from typing import Any

import pytest

from verl.config.algorithm import AlgoConfig, RolloutCorrectionConfig

NONE: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
TOKEN = {"rollout_is": "token"}
SEQUENCE = {"rollout_is": "sequence"}
RATIO_BAND = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
GEO_BAND = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_BOUND = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
GRADIENT = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_seq_is_rs": SEQUENCE | RATIO_BAND,
    "decoupled_geo_rs": GEO_BAND,
    "decoupled_geo_rs_seq_tis": SEQUENCE | GEO_BAND,
    "decoupled_geo_rs_token_tis": TOKEN | GEO_BAND,
    "decoupled_k3_rs": K3_BOUND,
    "decoupled_k3_rs_seq_tis": SEQUENCE | K3_BOUND,
    "decoupled_k3_rs_token_tis": TOKEN | K3_BOUND,
    "bypass_ppo_clip": CLIP,
    "bypass_ppo_clip_geo_rs": GEO_BAND | CLIP,
    "bypass_ppo_clip_k3_rs": K3_BOUND | CLIP,
    "bypass_pg_is": SEQUENCE | GRADIENT,
    "bypass_pg_geo_rs": GEO_BAND | GRADIENT,
    "bypass_pg_geo_rs_seq_tis": SEQUENCE | GEO_BAND | GRADIENT,
    "bypass_pg_geo_rs_token_tis": TOKEN | GEO_BAND | GRADIENT,
    "disabled": {},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_documented_values(name: str):
    preset = getattr(RolloutCorrectionConfig, name)()
    assert {key: preset[key] for key in NONE} == NONE | PRESETS[name]


def test_every_preset_is_listed_here():
    methods = {
        name
        for name, value in vars(RolloutCorrectionConfig).items()
        if isinstance(value, classmethod)
    }
    assert methods == set(PRESETS)


def test_thresholds_are_positional_importance_first():
    assert RolloutCorrectionConfig.decoupled_token_is(5.0).rollout_is_threshold == 5.0
    both = RolloutCorrectionConfig.decoupled_seq_is_rs(3.0, "0.8_1.25")
    assert (both.rollout_is_threshold, both.rollout_rs_threshold) == (3.0, "0.8_1.25")
    assert RolloutCorrectionConfig.decoupled_k3_rs(0.05).rollout_rs_threshold == 0.05


def test_correction_is_off_unless_asked_for():
    assert AlgoConfig().rollout_correction == RolloutCorrectionConfig.disabled()
    assert RolloutCorrectionConfig().rollout_is == "sequence"


def test_an_unknown_level_of_weights_is_refused():
    with pytest.raises(
        ValueError, match="rollout_is is 'word'; it must be one of: token, sequence"
    ):
        RolloutCorrectionConfig(rollout_is="word")
