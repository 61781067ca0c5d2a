"""Online DPO, SPIN, SPPO and the newer losses from files to weights."""

import json

import pytest
import torch

from tests.toy import ACTOR, ROLLOUT, recipe_run, weights
from tests.trainer.recipes.pair_cases import NOISE, RUNS, learn

HALF = "custom_reward_function.path={toy}/parity.py"  # every second response, from the start


def half(toy):
    return HALF.format(toy=toy)


def reference_weights(trainer):
    module = trainer.actor_rollout_wg.workers[0].reference.engine.module
    return dict(module.named_parameters())


def test_the_policy_of_spin_becomes_its_reference(toy, tmp_path):
    metrics, trainer = recipe_run(
        toy, tmp_path, "spin", half(toy), "trainer.ref_update_freq=2", f"{ROLLOUT}.n=4"
    )
    policy, reference = weights(trainer), reference_weights(trainer)
    assert all(torch.equal(policy[name], reference[name]) for name in policy)
    first, second = metrics
    assert first["actor/ref_distance"] == 0
    assert second["actor/ref_distance"] > 0  # step 1 moved the policy and not the reference
    assert second["actor/dpo_margin"] != 0
    pairs = first["preference/num_pairs"]
    assert pairs + first["preference/num_prompts_tied"] == 4
    assert first["actor/dpo_num_pairs"] == pairs > 0
    assert len(trainer.batch) == 2 * second["preference/num_pairs"]
    assert first["actor/pg_loss"] == pytest.approx(0.6931, abs=1e-4)  # log 2: nothing learnt yet


def test_equal_rewards_teach_nothing_and_are_counted(toy, tmp_path):
    (tmp_path / "same.py").write_text("def compute_score(*args, **kwargs):\n    return 1.0\n")
    metrics, trainer = recipe_run(
        toy,
        tmp_path / "out",
        "online_dpo",
        f"custom_reward_function.path={tmp_path / 'same.py'}",
        "trainer.total_training_steps=1",
    )
    assert metrics[0]["preference/num_prompts_tied"] == 4
    assert metrics[0]["preference/num_pairs"] == metrics[0]["actor/grad_norm"] == 0
    assert metrics[0]["critic/score/mean"] == 1
    assert len(trainer.batch) == 2


def test_the_answers_of_the_dataset_are_learnt(toy, tmp_path):
    """SPIN as published: no rewards, the policy's responses lose against the data."""
    lines = (toy / "train.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "solution": "7777"} for line in lines]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, _ = recipe_run(
        toy,
        tmp_path / "out",
        "spin",
        f"data.train_files={data}",
        "data.chosen_key=solution",
        f"{ROLLOUT}.n=1",
        "trainer.total_training_steps=6",
    )
    assert metrics[0]["preference/num_pairs"] == 4
    assert metrics[-1]["critic/score/mean"] > metrics[0]["critic/score/mean"] + 0.1


def test_a_column_of_answers_that_is_not_there_is_named(toy, tmp_path):
    with pytest.raises(ValueError, match=r"data\.chosen_key is 'solution', but the training rows"):
        recipe_run(toy, tmp_path, "spin", "data.chosen_key=solution")


@pytest.mark.parametrize("micro", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_micro_batches_and_shuffled_mini_batches_keep_pairs_whole(toy, tmp_path, micro):
    """Two mini-batches of two prompts; the second compares with a policy that has moved."""
    changes = [half(toy), f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=2"]
    changes += [f"{ACTOR}.shuffle=true", f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.ppo_epochs=2"]
    changes += ["trainer.total_training_steps=1"]
    whole, _ = recipe_run(toy, tmp_path / "whole", "online_dpo", *changes)
    cut, _ = recipe_run(
        toy,
        tmp_path / "cut",
        "online_dpo",
        *changes,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}",
    )
    assert whole[0]["preference/num_pairs"] >= 3
    assert whole[0]["actor/num_optimizer_steps"] == 4
    assert whole[0]["actor/dpo_num_pairs"] * 2 == whole[0]["preference/num_pairs"]
    for name in ("pg_loss", "dpo_margin", "dpo_accuracy", "grad_norm", "dpo_chosen_reward"):
        name = f"actor/{name}"
        assert cut[0][name] == pytest.approx(whole[0][name], rel=2e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["online_dpo", "spin"])
def test_two_ranks_learn_the_same_from_pairs(toy, tmp_path, recipe):
    changes = [half(toy), f"{ROLLOUT}.n=4", f"{ACTOR}.optim.lr=1e-5"]
    changes += [f"{ACTOR}.ppo_mini_batch_size=2"]
    ranks = ["trainer.n_gpus_per_node=2", "trainer.controller=local"]
    one, _ = recipe_run(toy, tmp_path / "one", recipe, *changes)
    two, _ = recipe_run(toy, tmp_path / "two", recipe, *changes, *ranks)
    for name in ("pg_loss", "dpo_margin", "dpo_num_pairs", "grad_norm", "ref_distance"):
        name = f"actor/{name}"
        assert [s[name] for s in two] == pytest.approx([s[name] for s in one], rel=1e-3, abs=1e-5)


def test_a_session_cut_into_rows_teaches_the_same(toy, tmp_path):
    found = {}
    for loop in ("Answering", "Cutting"):
        loops = tmp_path / f"{loop}.yaml"
        loops.write_text(f"- name: tried\n  _target_: tests.trainer.test_sessions.{loop}\n")
        (found[loop],), trainer = recipe_run(
            toy,
            tmp_path / loop,
            "online_dpo",
            f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
            f"{ROLLOUT}.agent.default_agent_loop=tried",
            f"{ROLLOUT}.n=4",
            "data.max_prompt_length=16",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
            f"{ACTOR}.optim.lr=1e-5",
            "trainer.total_training_steps=1",
        )
    assert len(trainer.batch) > 2 * found["Cutting"]["preference/num_pairs"] > 0
    for name in ("pg_loss", "dpo_margin", "dpo_num_pairs", "grad_norm"):
        name = f"actor/{name}"
        expected = found["Answering"][name]
        assert found["Cutting"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_learns_the_toy(toy, tmp_path, name):
    scores = learn(toy, tmp_path / name, name)
    assert scores[0] < 0.1
    assert scores[-1] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["online_dpo", "spin", "sppo", "gvpo"])
def test_it_learns_nothing_from_rewards_that_know_nothing_of_the_task(toy, tmp_path, name):
    reward = tmp_path / "noise.py"
    reward.write_text(NOISE)
    path = f"custom_reward_function.path={reward}"
    scores = learn(toy, tmp_path / "out", name, path, metric="reward/sevens/mean")
    assert max(scores) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["online_dpo", "spin", "sppo", "gvpo"])
def test_without_a_learning_rate_it_stays_where_it_is(toy, tmp_path, name):
    assert max(learn(toy, tmp_path / name, name, f"{ACTOR}.optim.lr=0.0")) < 0.1
