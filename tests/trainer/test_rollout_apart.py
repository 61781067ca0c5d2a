"""A rollout with ranks of its own gives the run of one that shares the actor's."""

import pytest

from tests.toy import toy_run
from tests.trainer.test_ranks import EVERYTHING, KeepsResponses, assert_same_run
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.trainer.plan.layout import placement

APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)


@pytest.mark.slow
def test_a_rollout_apart_samples_and_trains_as_one_beside_the_actor_does(toy, tmp_path):
    expected, beside = toy_run(toy, tmp_path / "beside", *EVERYTHING, trainer_class=KeepsResponses)
    found, apart = toy_run(
        toy,
        tmp_path / "apart",
        *EVERYTHING,
        *APART,
        "trainer.controller=local",
        trainer_class=KeepsResponses,
    )
    apart.stop_workers()
    assert beside.rollout_wg is beside.actor_rollout_wg
    assert apart.rollout_wg is not apart.actor_rollout_wg
    assert not apart.actor_rollout_wg.workers[0].is_rollout
    assert apart.num_devices == 2
    assert apart.seen == beside.seen
    assert_same_run(found, expected)


@pytest.mark.slow
def test_a_run_with_a_rollout_apart_continues_from_a_checkpoint(toy, tmp_path):
    steps = ("trainer.total_training_steps=3", "trainer.controller=local", "trainer.save_freq=1")
    listed = (
        "actor_rollout_ref.hybrid_engine=false",
        "trainer.n_gpus_per_node=2",
        "resource_pool.actor_rollout_ref.devices=[0]",
        "resource_pool.rollout.devices=[1]",
    )
    expected, _ = toy_run(toy, tmp_path / "straight", *steps)
    toy_run(toy, tmp_path / "cut", *steps, "trainer.total_training_steps=2")
    rest, apart = toy_run(toy, tmp_path / "cut", *steps, *listed)
    apart.stop_workers()
    assert apart.rollout_wg.world_size == 1
    assert [step["step"] for step in rest] == [3]
    assert_same_run(rest, expected[-1:])


def test_the_plan_shows_the_ranks_that_only_generate():
    config = load_config(
        {
            "actor_rollout_ref": {
                "hybrid_engine": False,
                "rollout": {"nnodes": 2, "n_gpus_per_node": 4, "tensor_model_parallel_size": 2},
            },
            "trainer": {"n_gpus_per_node": 1},
        },
        PPOConfig,
    ).checked()
    plan = placement(config)
    rollout = next(role for role in plan.roles if role.role == "rollout")
    assert plan.controller == "ray", "nine devices in all"
    assert rollout.pool == "a pool of 2 x 4"
    assert rollout.layout == "native, 4 engines, tensor parallel 2, weights sent by the actor"
