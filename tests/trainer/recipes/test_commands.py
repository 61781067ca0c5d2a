"""Commands of recipes that are settings: the paper's values, and the keys that scripts have."""

import sys
from importlib import import_module

import pytest

from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer import main_ppo
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_object

DAPO = (
    "reward_model.overlong_buffer.enable=True",
    "reward_model.overlong_buffer.len=128",
    "reward_model.overlong_buffer.penalty_factor=1.0",
    "data.max_response_length=512",
    "data.gen_batch_size=1536",
    "algorithm.filter_groups.max_num_gen_batches=10",
)


def loaded(monkeypatch, module, *arguments):
    """What the command has understood, instead of a run."""
    found = []
    monkeypatch.setattr(main_ppo, "run", found.append)
    monkeypatch.setattr(sys, "argv", [module, *arguments, "trainer.dry_run=True"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    import_module(module).main()
    assert found[0].faults == []
    return found[0].config


def test_dapo_takes_the_keys_of_its_scripts(monkeypatch):
    config = loaded(monkeypatch, "recipe.dapo.main_dapo", *DAPO)
    actor, kwargs = config.actor_rollout_ref.actor, config.reward_model.reward_kwargs
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.loss_agg_mode == "token-mean"
    assert config.algorithm.filter_groups.metric == "acc"
    assert config.reward_manager.name == "dapo"
    assert kwargs["max_resp_len"] == 512
    assert kwargs["overlong_buffer_cfg"] == {"enable": True, "len": 128, "penalty_factor": 1.0}


def test_entropy_takes_the_keys_of_its_scripts(monkeypatch):
    arguments = (
        "actor_rollout_ref.actor.loss_mode=clip-cov",
        "actor_rollout_ref.actor.clip_cov_ratio=0.001",
    )
    config = loaded(monkeypatch, "recipe.entropy.main_entropy", *arguments)
    loss = config.actor_rollout_ref.actor.policy_loss
    assert (loss.loss_mode, loss.clip_cov_ratio) == ("clip_cov", 0.001)
    default = loaded(monkeypatch, "recipe.entropy.main_entropy")
    assert default.actor_rollout_ref.actor.policy_loss.loss_mode == "kl_cov"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("vapo", "lam_critic", 1.0),
        ("vapo", "lam_actor_alpha", 0.05),
        ("pf_ppo", "use_pf_ppo", True),
        ("collabllm", "adv_estimator", "grpo"),
        ("retool", "adv_estimator", "grpo"),
        ("search_r1", "adv_estimator", "grpo"),
    ],
)
def test_a_recipe_starts_from_its_file(monkeypatch, name, key, value):
    config = loaded(monkeypatch, f"recipe.{name}.main_{name}")
    assert config.algorithm[key] == value
    assert config.trainer.recipe == (name if name == "pf_ppo" else None)


@pytest.mark.parametrize(
    ("name", "tool"), [("retool", "code_interpreter"), ("search_r1", "search")]
)
def test_a_recipe_with_tools_has_its_tool_and_its_turns(monkeypatch, name, tool):
    config = loaded(monkeypatch, f"recipe.{name}.main_{name}")
    turns = config.actor_rollout_ref.rollout.multi_turn
    tools = initialize_tools_from_config(turns.tool_config_path)
    assert turns.enable
    assert [one.name for one in tools] == [tool]
    if name == "retool":
        path, dataset = config.data.custom_cls.path, config.data.custom_cls.name
        assert issubclass(load_extern_object(path, dataset), RLHFDataset)
        reward = config.custom_reward_function
        score = load_extern_object(reward.path, reward.name)
        assert score("math", "\\boxed{4}", "4")["score"] == 1.0
