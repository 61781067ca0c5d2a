"""Updating while generating is refused where it would not be the same update."""

import pytest

from tests.config.test_validate import A, C, R, mistakes
from verl.algos.policy_losses.terms import is_prepared
from verl.algos.registry import get_policy_loss_fn
from verl.config.names import ESTIMATORS, POLICY_LOSSES
from verl.config.validate_overlap import (
    GROUP_LOCAL_ESTIMATORS,
    ROW_LOCAL_LOSSES,
    SEQUENCE_LOSSES,
)

FINE = {
    f"{A}.update_while_generating": True,
    f"{A}.ppo_mini_batch_size": 64,
    f"{R}.n": 4,
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "trainer.n_gpus_per_node": 1,
}


def test_a_plain_grpo_run_on_one_device_may_overlap():
    assert mistakes(FINE) == []


CASES = [
    ({"algorithm.adv_estimator": "gpg"}, "algorithm.adv_estimator is", "grpo, "),
    ({"algorithm.adv_estimator": "reinforce_plus_plus"}, "algorithm.adv_estimator", "rloo"),
    ({"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator", "one prompt"),
    ({f"{A}.ppo_epochs": 2}, f"{A}.ppo_epochs is 2", "set it to 1"),
    ({f"{A}.ppo_mini_batch_size": 32}, f"{A}.ppo_mini_batch_size is 32", "64"),
    ({"trainer.critic_warmup": 3}, "trainer.critic_warmup is 3", "set it to 0"),
    ({f"{A}.policy_loss.loss_mode": "kl_cov"}, f"{A}.policy_loss.loss_mode", "vanilla"),
    ({f"{A}.policy_loss.loss_mode": "gspo"}, f"{A}.loss_agg_mode", "seq-mean-token-mean"),
    ({f"{A}.use_kl_loss": True}, f"{A}.use_kl_loss is True", "set it to False"),
    ({"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward is True", "False"),
    ({"critic.enable": True}, "critic.enable is True", "set it to False"),
    ({f"{C}.rollout_is": "token"}, f"{C}.rollout_is is", "set it to null"),
    ({f"{A}.fsdp_config.dtype": "fp16"}, f"{A}.fsdp_config.dtype is", "use bf16"),
    ({"trainer.n_gpus_per_node": 2}, "trainer.n_gpus_per_node is 2", "to 1"),
    ({"trainer.controller": "ray"}, "trainer.controller is", "use auto or local"),
    ({f"{R}.name": "hf"}, f"{R}.name is", "use native"),
    ({f"{R}.skip_rollout": True}, f"{R}.skip_rollout is True", "set it to False"),
    ({"reward_model.use_reward_loop": False}, "reward_model.use_reward_loop is False", "True"),
    (
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
        "algorithm.filter_groups.enable is True",
        "set it to False",
    ),
]


@pytest.mark.parametrize(("values", "begins", "offers"), CASES, ids=[case[1] for case in CASES])
def test_what_cannot_be_overlapped_is_refused_by_name(values, begins, offers):
    found = [text for text in mistakes({**FINE, **values}) if text.startswith(begins)]
    assert found
    assert offers in found[0]
    assert f"with {A}.update_while_generating=True" in found[0]
    off = {**FINE, **values, f"{A}.update_while_generating": False}
    assert not any("update_while_generating" in text for text in mistakes(off))


def test_the_lists_hold_known_names_and_no_loss_that_compares_rows():
    assert set(GROUP_LOCAL_ESTIMATORS) < set(ESTIMATORS)
    losses = {*ROW_LOCAL_LOSSES, *SEQUENCE_LOSSES}
    assert losses < set(POLICY_LOSSES)
    assert not any(is_prepared(get_policy_loss_fn(name)) for name in losses)
