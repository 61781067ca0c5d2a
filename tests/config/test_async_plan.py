"""Every asynchronous command comes to one plan, and what cannot be is refused with a way out."""

from dataclasses import replace

import pytest

from tests.config.composing import from_command_line
from verl.config.async_plan import AsyncPlan, plan_of
from verl.config.convert import to_dictconfig
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.presets import PRESETS
from verl.config.validate import advice, relation_faults

R = "actor_rollout_ref.rollout"
APART = ("actor_rollout_ref.hybrid_engine=False", f"{R}.nnodes=1", f"{R}.free_cache_engine=False")
CLIP = "algorithm.rollout_correction.bypass_mode=True"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=32"
LENDS = "async_training.use_dynamic_resource_scheduling=True"
SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch=True"
FULL = (MINI, "rollout.total_rollout_steps=2048", "async_training.require_batches=2")


def composed(*arguments: str, name: str = "ppo_trainer"):
    return from_command_line(*arguments, config_name=name)


def faults(*arguments: str, name: str = "ppo_trainer") -> list[str]:
    loaded = composed(*arguments, name=name).loaded
    return [fault.text for fault in relation_faults(loaded.checked(), loaded.user_set)]


PLANS = [
    ("ppo_trainer", (), None),
    ("ppo_trainer", ("trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async"), None),
    (
        "ppo_trainer",
        (
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=2",
            CLIP,
        ),
        AsyncPlan(batch=1024, staleness=2.0, lag=0),
    ),
    (
        "ppo_trainer",
        ("trainer.v1.trainer_mode=separate_async", *APART, CLIP),
        AsyncPlan(batch=1024, sync_every=4, staleness=0.25, lag=1),
    ),
    ("one_step_off_ppo_trainer", (), AsyncPlan(batch=1024, staleness=1.0, lag=1, is_partial=False)),
    (
        "one_step_off_ppo_trainer",
        ("rollout.partial_rollout=True", "async_training.reply_tokens=8"),
        AsyncPlan(batch=1024, staleness=1.0, lag=1, reply_tokens=8),
    ),
    (
        "fully_async_ppo_trainer",
        FULL,
        AsyncPlan(batch=64, sync_every=4, staleness=0.1, lag=1),
    ),
    (
        "fully_async_ppo_trainer",
        (*FULL, "async_training.staleness_threshold=0", "async_training.partial_rollout=False"),
        AsyncPlan(batch=64, sync_every=4, staleness=0.0, lag=1, is_partial=False),
    ),
    (
        "fully_async_ppo_trainer",
        (
            *FULL,
            "async_training.staleness_threshold=0",
            "async_training.trigger_parameter_sync_step=1",
        ),
        AsyncPlan(batch=64, sync_every=1, staleness=0.0, lag=0),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "plan"), PLANS)
def test_the_keys_of_each_command_make_its_plan(name, arguments, plan):
    config = composed(*arguments, name=name).config
    if plan is not None and plan.lag and plan.is_partial:
        tokens = config.actor_rollout_ref.rollout.response_length // (plan.max_staleness + 1)
        plan = replace(plan, update_tokens=tokens)
    assert plan_of(config) == plan
    assert faults(*arguments, name=name) == []


def test_lengths_of_a_fully_asynchronous_run_become_those_of_every_run():
    config = composed(*FULL, "rollout.test_freq=3", name="fully_async_ppo_trainer").config
    assert config.data.train_batch_size == 64
    assert config.trainer.total_training_steps == 2048 // 64
    assert config.trainer.test_freq == 3 * 4
    assert config.algorithm.rollout_correction.bypass_mode
    again = load_config(to_dictconfig(config), PPOConfig)
    assert plan_of(again.config) == plan_of(config)
    assert again.config.trainer.total_training_steps == 32


def test_a_proximal_policy_is_computed_where_it_is_asked_for():
    proximal = "async_training.compute_prox_log_prob=True"
    config = composed(*FULL, proximal, name="fully_async_ppo_trainer").config
    correction = config.algorithm.rollout_correction
    assert (correction.bypass_mode, correction.rollout_is) == (False, "token")


REFUSED = [
    ("ppo_trainer", ("trainer.v1.trainer_mode=colocate_async",), "needs a correction"),
    ("ppo_trainer", ("trainer.v1.trainer_mode=separate_async",), "native_process"),
    ("one_step_off_ppo_trainer", (f"{R}.free_cache_engine=True",), "set it to False"),
    ("one_step_off_ppo_trainer", ("data.train_batch_size=0",), "at least 1"),
    ("one_step_off_ppo_trainer", ("algorithm.adv_estimator=remax",), "use grpo"),
    (
        "one_step_off_ppo_trainer",
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
        "known only when they are graded",
    ),
    (
        "one_step_off_ppo_trainer",
        ("trainer.v1.trainer_mode=colocate_async",),
        "leave trainer.v1.trainer_mode at sync",
    ),
    ("one_step_off_ppo_trainer", (f"{R}.skip_rollout=True",), "dumps are of whole steps"),
    (
        "one_step_off_ppo_trainer",
        (f"{R}.name=vllm", f"{R}.calculate_log_probs=False", "trainer.n_gpus_per_node=2"),
        "log-probabilities with which tokens were drawn",
    ),
    (
        "fully_async_ppo_trainer",
        (*FULL, "data.train_batch_size=100"),
        "set data.train_batch_size=0",
    ),
    ("fully_async_ppo_trainer", (*FULL, "data.gen_batch_size=7"), "data.gen_batch_size=1"),
    ("fully_async_ppo_trainer", (MINI, "rollout.total_rollout_steps=31"), "raise it"),
    (
        "fully_async_ppo_trainer",
        (
            *FULL,
            LENDS,
            "async_training.staleness_threshold=0",
            "async_training.trigger_parameter_sync_step=1",
        ),
        "the trainer and generation take turns anyway",
    ),
    (
        "fully_async_ppo_trainer",
        (*FULL, LENDS, f"{R}.name=vllm"),
        "devices are lent to the built-in engine on ranks of its own",
    ),
    (
        "ppo_trainer",
        ("trainer.v1.trainer_mode=separate_async", f"{R}.name=native_process", SWITCH),
        "set hybrid_engine=False",
    ),
    (
        "ppo_trainer",
        (
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=9",
        ),
        "can be 9 steps old",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "way_out"), REFUSED)
def test_what_cannot_be_is_refused_with_a_way_out(name, arguments, way_out):
    assert any(way_out in text for text in faults(*arguments, name=name))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize(("every", "staleness"), [(1, 0), (1, 1), (1, 0.5), (4, 0.1), (3, 2.0)])
def test_the_bound_of_staleness_follows_from_the_capacity(batch, every, staleness):
    plan = AsyncPlan(batch=batch, sync_every=every, staleness=staleness)
    for published in range(0, 5 * every, every):
        youngest = plan.capacity(published) - 1  # the last prompt that these weights may start
        assert youngest // batch - published == plan.max_staleness
        assert plan.capacity(published) >= batch * (published + every)


def test_what_is_due_between_two_updates_is_done_at_the_next():
    plan = AsyncPlan(batch=4, sync_every=4)
    updates = [4, 8, 12, 16, 20, 24]
    assert [step for step in updates if plan.is_due(step, 3)] == updates
    assert [step for step in updates if plan.is_due(step, 6)] == [8, 12, 20, 24]
    every_step = AsyncPlan(batch=4)
    assert [step for step in range(1, 10) if every_step.is_due(step, 3)] == [3, 6, 9]


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"lag": 2}, {"staleness": -1.0}, {"sync_every": 0}, {"kv_after_update": "no"}],
)
def test_a_plan_refuses_what_means_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AsyncPlan(**{"batch": 4, **wrong})


@pytest.mark.parametrize("name", PRESETS)
def test_files_of_asynchronous_runs_are_loaded(name):
    assert composed(name=name).loaded.faults == []


@pytest.mark.parametrize(
    ("name", "arguments", "num_steps"),
    [
        ("one_step_off_ppo_trainer", (), 1),
        ("fully_async_ppo_trainer", FULL, 4),
        ("ppo_trainer", (), None),
        ("ppo_trainer", ("trainer.v1.trainer_mode=colocate_async", CLIP), 1),
    ],
)
def test_the_kl_in_the_loss_of_older_tokens_gets_a_word_of_advice(name, arguments, num_steps):
    with_kl = composed(*arguments, "actor_rollout_ref.actor.use_kl_loss=True", name=name)
    said = [text for text in advice(with_kl.loaded.config) if "no importance weight" in text]
    plan = plan_of(with_kl.loaded.config)
    assert plan is None or plan.max_staleness == num_steps
    assert len(said) == (num_steps is not None and num_steps > 0)
    assert all(f"up to {num_steps} steps old" in text for text in said)
    assert all("algorithm.use_kl_in_reward=True" in text for text in said)
    without = composed(*arguments, name=name).loaded.config
    assert not any("no importance weight" in text for text in advice(without))
