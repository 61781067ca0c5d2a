"""The loop: from rows with seeds, through turns of the built-in engine, to rewards that train."""

import json

import pytest

from tests.toy import ROLLOUT, toy_run
from verl.agent_loop.env_agent import MARKER, environment_of, episode_seed, shortened
from verl.config.env import EnvConfig
from verl.config.ppo import PPOConfig
from verl.environments.make_data import main as make_data
from verl.environments.pool import EnvironmentSpec

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
BRIEF = "tests.environments.worlds.Brief"


def env_run(toy, tmp_path, *changes, kwargs=None):
    out = str(tmp_path / "train.parquet")
    make_data(["--env", BRIEF, "--num", "24", "--out", out, "--kwargs", json.dumps(kwargs or {})])
    return toy_run(
        toy,
        tmp_path,
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'train.parquet'}",
        f"actor_rollout_ref.model.custom_chat_template={json.dumps(TEMPLATE)}",
        "data.max_prompt_length=16",
        "data.max_response_length=64",
        f"{ROLLOUT}.agent.default_agent_loop=env_agent",
        "custom_reward_function.path=null",
        *changes,
    )


def test_a_policy_learns_from_the_rewards_of_its_turns(toy, tmp_path):
    changes = [
        f"{ROLLOUT}.n=8",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=8",
    ]
    metrics, trainer = env_run(toy, tmp_path, *changes)
    scores = [step["critic/score/mean"] for step in metrics if "critic/score/mean" in step]
    assert scores[0] < 0.3
    assert scores[-1] > scores[0] + 0.3
    assert not trainer.tripwires.counts.keys() & {"ratio_not_one", "rollout_mismatch", "non_finite"}
    columns = trainer.batch.non_tensor_batch
    words = {uid: set() for uid in columns["uid"]}
    for uid, info, turns, score in zip(
        columns["uid"],
        columns["env_info"],
        columns["turn_scores"],
        trainer.batch.batch["token_level_scores"].sum(-1).tolist(),
        strict=True,
    ):
        words[uid] |= {info["word"]} if info else set()
        assert sum(turns) == pytest.approx(score)
    assert all(len(seen) <= 1 for seen in words.values())  # one episode for all samples
    assert len(set.union(*words.values())) > 1


def test_broken_worlds_are_left_out_and_counted(toy, tmp_path):
    _, trainer = env_run(
        toy,
        tmp_path,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.multi_turn.max_infra_ratio=1.0",
        kwargs={"breaks_every": 2},
    )
    seeds = [info["seed"] for info in trainer.batch.non_tensor_batch["extra_info"]]
    assert seeds
    assert all(seed % 2 for seed in seeds)


def test_rows_say_which_episode_of_which_world():
    config = PPOConfig(env=EnvConfig(name="a.B", kwargs={"x": 1}))
    assert environment_of({}, config) == EnvironmentSpec(name="a.B", kwargs={"x": 1})
    stated = {"name": "c.D", "kwargs": '{"y": 2}'}
    own = EnvironmentSpec(name="c.D", kwargs={"y": 2})
    assert environment_of({"env": stated}, config) == own
    assert environment_of({"extra_info": {"env": stated}}, config) == own
    with pytest.raises(ValueError, match=r"set env\.name"):
        environment_of({}, PPOConfig())
    assert episode_seed({"extra_info": {"seed": 7}, "uid": "1-2"}) == 7
    assert (
        episode_seed({"uid": "1-2"}) == episode_seed({"uid": "1-2"}) != episode_seed({"uid": "1"})
    )


def test_a_long_observation_loses_its_middle():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 5) == f"abc{MARKER}fg"
