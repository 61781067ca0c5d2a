"""The loop: from rows with seeds, through turns of the built-in engine, to rewards that train."""

import json

import pytest

from tests.agent_loop.scripted import (
    END,
    ScriptedRollout,
    call,
    chatml_tokenizer,
    run_loop,
    turns_config,
)
from tests.environments.test_pool import bad
from tests.toy import ROLLOUT, toy_run
from verl.agent_loop.env_agent import MARKER, EnvAgentLoop, environment_of, episode_seed, shortened
from verl.config.ppo import EnvConfig, PPOConfig
from verl.environments.make_data import main as make_data
from verl.environments.pool import EnvironmentSpec
from verl.protocol.trajectory import InfraFault

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


@pytest.mark.slow
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


def play(*script, env, response_length=400, prompt=None, max_observation_length=8192, **row):
    turns = turns_config(response_length, **row.pop("multi_turn", {}))
    limits = EnvConfig(num_workers=2, max_observation_length=max_observation_length)
    config = PPOConfig(data=turns.data, actor_rollout_ref=turns.actor_rollout_ref, env=limits)
    engine = ScriptedRollout(*script)
    system = [{"role": "system", "content": "Play."}]
    row = {"env": env, "uid": "1-1", **row}
    output = run_loop(config, engine, prompt or system, cls=EnvAgentLoop, **row)
    return output, chatml_tokenizer().decode(output.prompt_ids + output.response_ids)


def test_methods_are_called_as_tools_and_mistakes_are_told():
    env = {"name": "tests.environments.worlds.Counter", "kwargs": {"goal": 3}}
    script = [
        call("add", '{"number": 1}') + END,
        call("add", '{"number": ') + END,
        call("add", '{"number": 2}') + END,
    ]
    output, text = play(*script, env=env)
    assert "Reach 3 from 0." in text
    assert "Invalid JSON in arguments for 'add'" in text
    assert (output.reward_score, output.extra_fields["turn_scores"]) == (1.0, [0.0, 0.0, 1.0])
    said = [i for i, m in zip(output.response_ids, output.response_mask, strict=True) if m]
    assert chatml_tokenizer().decode(said) == "".join(script)


ECHO = {"name": "tests.environments.worlds.Echo"}


def test_an_episode_ends_by_itself_by_its_turns_or_when_there_is_no_room():
    extra = {"extra_info": {"seed": 3}}
    whole, text = play("a" + END, "stop" + END, env=ECHO, topic="war", **extra)
    assert text.index("Play.") < text.index("war 0.") < text.index("a 0.")
    assert (whole.reward_score, whole.num_turns) == (1.0, 4)
    short, _ = play("a" + END, env=ECHO, multi_turn={"max_assistant_turns": 1}, **extra)
    assert short.reward_score == 0.5
    full, _ = play("a" + END, env=ECHO, response_length=8, **extra)
    assert (full.reward_score, len(full.response_mask)) == (0.5, sum(full.response_mask))
    cut, _ = play("a long speech", env=ECHO, response_length=3, **extra)
    assert (cut.reward_score, cut.stop_reason) == (0.0, "length")
    own = [{"role": "user", "content": "Mine."}]
    _, text = play("stop" + END, env=ECHO, prompt=own, **extra)
    assert "Mine." in text
    assert "0." not in text
    _, text = play("a" * 90 + END, "stop" + END, env=ECHO, max_observation_length=20, **extra)
    assert "aaaaaaaaaa" + MARKER in text


def test_a_broken_world_is_a_fault_and_not_a_reward():
    with pytest.raises(InfraFault, match="Bad of prompt 1-1 failed: step raised KeyError"):
        play("go" + END, env=vars(bad("raises")))


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
