import pytest
from omegaconf import OmegaConf

from verl.single_controller.base import Worker
from verl.trainer.ppo.utils import (
    Role,
    WorkerType,
    need_critic,
    need_reference_policy,
    need_reward_model,
)


def config(*, in_reward=False, in_loss=False, critic=None, estimator="grpo", rm=False):
    return OmegaConf.create(
        {
            "algorithm": {"use_kl_in_reward": in_reward, "adv_estimator": estimator},
            "actor_rollout_ref": {"actor": {"use_kl_loss": in_loss}},
            "critic": {"enable": critic},
            "reward_model": {"enable": rm},
        }
    )


def test_roles_have_the_names_that_configurations_use():
    names = {role.name: str(role) for role in Role}
    assert names == {
        "Actor": "actor",
        "Rollout": "rollout",
        "ActorRollout": "actor_rollout",
        "Critic": "critic",
        "RefPolicy": "ref",
        "RewardModel": "rm",
        "ActorRolloutRef": "actor_rollout_ref",
        "Env": "env",
        "Teacher": "teacher",
    }
    assert all(Role.from_string(str(role)) is role for role in Role)
    with pytest.raises(ValueError, match="unknown role 'judge'; the roles are: actor, rollout"):
        Role.from_string("judge")
    assert WorkerType == type[Worker]


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "needed"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_a_reference_policy_is_needed_for_kl_in_reward_or_loss(in_reward, in_loss, needed):
    assert need_reference_policy(config(in_reward=in_reward, in_loss=in_loss)) is needed


def test_a_mapping_of_roles_says_what_is_needed_by_what_it_holds():
    roles = {Role.ActorRollout: object, Role.RefPolicy: object}
    assert need_reference_policy(roles)
    assert not need_reward_model(roles)
    assert need_reward_model({Role.RewardModel: object})
    assert not need_reference_policy({})


def test_a_reward_model_is_needed_when_it_is_enabled():
    assert need_reward_model(config(rm=True))
    assert not need_reward_model(config())


@pytest.mark.parametrize(
    ("enable", "estimator", "needed"),
    [
        (None, "gae", True),
        (None, "grpo", False),
        (True, "grpo", True),
        (False, "gae", False),
    ],
)
def test_a_critic_is_needed_if_enabled_or_for_gae(enable, estimator, needed):
    assert need_critic(config(critic=enable, estimator=estimator)) is needed


def test_the_typed_configuration_is_understood_too():
    from verl.config.ppo import PPOConfig

    assert need_reference_policy(PPOConfig()) is False
    assert need_reward_model(PPOConfig()) is False
    assert need_critic(PPOConfig()) is True  # the default estimator is gae
