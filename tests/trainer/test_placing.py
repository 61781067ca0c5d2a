"""Where roles run: pools from the configuration, and what a cluster is asked for."""

from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import RayKwargsConfig, TrainerConfig
from verl.single_controller.local import CONTROLLER
from verl.trainer.on_ray import ray_init_arguments
from verl.trainer.ppo.placing import (
    POOL,
    REWARD_POOL,
    ROLLOUT_POOL,
    devices_of,
    make_pools,
    per_node,
    pool_of,
)
from verl.trainer.ppo.utils import Role
from verl.utils.environment import temp_env_var


def config(devices_per_node=4, nnodes=1, pools=None, **sections):
    trainer = TrainerConfig(n_gpus_per_node=devices_per_node, nnodes=nnodes, device="cpu")
    return PPOConfig(trainer=trainer, resource_pool=pools or {}, **sections)


def test_roles_without_devices_of_their_own_share_all():
    whole = config(nnodes=2)
    mapping = {
        Role.ActorRollout: pool_of(whole, "actor_rollout_ref"),
        Role.Critic: pool_of(whole, "critic"),
    }
    assert set(mapping.values()) == {POOL}
    manager = make_pools(whole, mapping, CONTROLLER, "cpu")
    assert manager.resource_pool_spec == {POOL: [4, 4]}
    assert manager.mapping == mapping


def test_a_role_with_devices_gets_a_pool_of_that_many_processes():
    apart = config(
        pools={"actor_rollout_ref": {"devices": [0, 1, 2]}, "critic": {"devices": [3]}},
        reward_model=FSDPRewardModelConfig(
            enable=True, enable_resource_pool=True, nnodes=1, n_gpus_per_node=2
        ),
    )
    mapping = {
        Role.ActorRollout: pool_of(apart, "actor_rollout_ref"),
        Role.Critic: pool_of(apart, "critic"),
        Role.RewardModel: REWARD_POOL,
    }
    manager = make_pools(apart, mapping, CONTROLLER, "cpu")
    assert manager.resource_pool_spec == {
        "actor_rollout_ref_pool": [3],
        "critic_pool": [1],
        REWARD_POOL: [2],
    }
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.ActorRollout).world_size == 3


def test_a_rollout_apart_has_devices_behind_those_of_the_trainer_or_the_listed_ones():
    beside = config(
        actor_rollout_ref=ActorRolloutRefConfig(
            hybrid_engine=False, rollout=RolloutConfig(nnodes=2, n_gpus_per_node=3)
        )
    )
    mapping = {Role.ActorRollout: POOL, Role.Rollout: ROLLOUT_POOL}
    assert make_pools(beside, mapping, CONTROLLER, "cpu").resource_pool_spec == {
        POOL: [4],
        ROLLOUT_POOL: [3, 3],
    }
    assert devices_of(beside, ROLLOUT_POOL) == [4, 5, 6, 7, 8, 9]
    assert devices_of(beside, POOL) is None
    assert ray_init_arguments(beside)["num_cpus"] == 1 + 3 * (4 + 6)
    listed = config(
        pools={"actor_rollout_ref": {"devices": [0, 1]}, "rollout": {"devices": [2, 3]}},
        actor_rollout_ref=ActorRolloutRefConfig(hybrid_engine=False),
    )
    mapping = {Role.ActorRollout: pool_of(listed, "actor_rollout_ref"), Role.Rollout: ROLLOUT_POOL}
    assert make_pools(listed, mapping, CONTROLLER, "cpu").resource_pool_spec[ROLLOUT_POOL] == [2]
    assert devices_of(listed, ROLLOUT_POOL) == [2, 3]


def test_devices_are_counted_node_by_node():
    assert per_node([0, 1, 2, 3], 4) == [4]
    assert per_node([2, 3, 4, 5, 6], 4) == [2, 3]
    assert per_node([4, 5], 4) == [2], "the first node has none"


def test_a_cluster_of_our_own_has_room_for_ranks_on_a_cpu():
    arguments = ray_init_arguments(config(devices_per_node=2))
    assert arguments["num_cpus"] == 1 + 3 * 2
    asked = config(ray_kwargs=RayKwargsConfig(ray_init={"num_cpus": 5}))
    assert ray_init_arguments(asked)["num_cpus"] == 5


def test_a_cluster_that_runs_already_is_joined_as_it_is():
    joined = config(ray_kwargs=RayKwargsConfig(ray_init={"address": "auto", "num_cpus": None}))
    assert ray_init_arguments(joined)["num_cpus"] is None
    assert ray_init_arguments(joined)["address"] == "auto"
    with temp_env_var("RAY_ADDRESS", "10.0.0.1:6379"):
        assert ray_init_arguments(config(ray_kwargs=RayKwargsConfig()))["num_cpus"] is None


def test_the_users_runtime_environment_wins_and_keeps_what_workers_need():
    own = {"env_vars": {"NCCL_DEBUG": "INFO", "MINE": "1"}, "working_dir": "/project"}
    asked = config(ray_kwargs=RayKwargsConfig(ray_init={"runtime_env": own}))
    made = ray_init_arguments(asked)["runtime_env"]
    assert made["working_dir"] == "/project"
    assert made["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert made["env_vars"]["MINE"] == "1"
    assert made["env_vars"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
