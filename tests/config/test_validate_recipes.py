"""Recipes that make pairs, and losses on whole sequences: contradictions are named before a run."""

import pytest

from tests.config.test_validate import A, C, R, mistakes
from verl.config.presets import PRESETS

SPIN = PRESETS["spin_trainer"].values
DPO = PRESETS["online_dpo_trainer"].values
SPPO = PRESETS["sppo_trainer"].values
LOSS = f"{A}.policy_loss.loss_mode"
GROUPS = {"algorithm.adv_estimator": "grpo", f"{R}.n": 4}
GDPO = {"algorithm.adv_estimator": "gdpo", f"{R}.n": 4}
TWO = {"algorithm.gdpo_reward_keys": ["a", "b"]}

CASES = [
    (DPO | {f"{R}.n": 1}, f"{R}.n is 1; a pair is two responses", "2 or more"),
    (SPIN | {f"{R}.n": 1}, f"{R}.n is 1; a pair is two responses", "data.chosen_key"),
    (GROUPS | {LOSS: "dpo"}, f"{LOSS} is dpo, which needs pairs", "recipe.spin.main_spin"),
    (SPIN | {LOSS: "vanilla"}, f'{LOSS} is "vanilla"', 'must be "dpo"'),
    (
        SPIN | {"algorithm.adv_estimator": "grpo"},
        'algorithm.adv_estimator is "grpo"; trainer.recipe=spin',
        "must be null",
    ),
    ({"algorithm.adv_estimator": None}, "algorithm.adv_estimator is null", "choose one"),
    (DPO | {"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward is True", "False"),
    (
        SPIN | {"actor_rollout_ref.model.lora_rank": 8},
        "trainer.ref_update_freq is 1; adapters",
        "set it to 0",
    ),
    (
        SPIN | {"actor_rollout_ref.ref.model.path": "/elsewhere"},
        "trainer.ref_update_freq is 1, and actor_rollout_ref.ref.model.path",
        "set it to 0",
    ),
    (
        SPIN | {"data.chosen_key": "solution", f"{A}.use_rollout_log_probs": True},
        f"{A}.use_rollout_log_probs is True",
        "not sampled",
    ),
    (SPPO | {f"{A}.loss_agg_mode": "token-sum"}, f'{A}.loss_agg_mode is "token-sum"', "leave it"),
    (DPO | {f"{C}.rollout_is": "token"}, f'{C}.rollout_is is "token"', "leave it out"),
    ({LOSS: "gvpo"}, f"{R}.n is 1; {LOSS}=gvpo", "2 or more"),
    (GROUPS | {LOSS: "dro"}, f"{A}.policy_loss.dro_beta is null", "0.05"),
    (GDPO, "algorithm.gdpo_reward_keys is empty", "[correct,format]"),
    (
        GDPO | TWO | {"algorithm.gdpo_reward_weights": [1.0]},
        "algorithm.gdpo_reward_weights has 1 weights for the 2",
        "gdpo_reward_keys",
    ),
    (
        GDPO | TWO | {"algorithm.use_kl_in_reward": True},
        "algorithm.use_kl_in_reward is True; algorithm.adv_estimator=gdpo",
        f"{A}.use_kl_loss=True",
    ),
]


@pytest.mark.parametrize(("values", "begins", "offers"), CASES, ids=[case[1] for case in CASES])
def test_a_contradiction_is_named_with_its_way_out(values, begins, offers):
    messages = mistakes(values)
    assert len(messages) == 1, messages
    assert messages[0].startswith(begins)
    assert offers in messages[0]


@pytest.mark.parametrize(
    "values",
    [
        DPO,
        SPIN,
        SPPO,
        SPIN | {f"{R}.n": 1, "data.chosen_key": "solution"},
        SPIN | {"trainer.ref_update_freq": 0, "actor_rollout_ref.model.lora_rank": 8},
        GDPO | TWO,
        GROUPS | {LOSS: "gvpo"},
        GROUPS | {LOSS: "dro", f"{A}.policy_loss.dro_beta": 0.05},
    ],
)
def test_what_belongs_together_is_accepted(values):
    assert mistakes(values) == []
