"""Reinforcement learning of adapters, from files to checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

from tests.toy import ACTOR, ROLLOUT, toy_run, weights
from verl.models.lora import is_adapter
from verl.trainer.ppo.trainer import PPOTrainer

MODEL = "actor_rollout_ref.model"
LORA = [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=16", f"{ACTOR}.optim.lr=0.02"]
PPO = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=4"]


def scores(metrics):
    return [step["critic/score/mean"] for step in metrics]


def test_adapters_learn_to_write_sevens_and_the_base_stays_as_it_was(toy, tmp_path):
    started = {}

    class KeepsStart(PPOTrainer):
        def fit(self):
            started.update(weights(self))
            super().fit()

    changes = [
        *LORA,
        f"{ROLLOUT}.n=8",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.use_kl_loss=true",
        "trainer.total_training_steps=12",
    ]
    metrics, trainer = toy_run(toy, tmp_path, *changes, trainer_class=KeepsStart)
    assert scores(metrics)[0] < 0.1
    assert scores(metrics)[-1] > 0.5
    assert not trainer.tripwires.counts.keys() & {"ratio_not_one", "rollout_mismatch"}
    assert metrics[0]["actor/ref_distance"] < 1e-6, "it starts as its own reference"
    assert metrics[-1]["actor/ref_distance"] > 1e-3
    for name, value in weights(trainer).items():
        assert torch.equal(started[name], value) != is_adapter(name), name


def same_weights(one, other):
    found = weights(other)
    return all(torch.equal(found[name], value) for name, value in weights(one).items())


def test_a_run_with_two_sets_of_adapters_continues_bit_for_bit(toy, tmp_path):
    changes = [*LORA, *PPO, "algorithm.use_kl_in_reward=true", "trainer.save_freq=2"]
    straight, whole = toy_run(toy, tmp_path / "a", *changes, "trainer.total_training_steps=4")
    toy_run(toy, tmp_path / "b", *changes, "trainer.total_training_steps=2")
    rest, resumed = toy_run(toy, tmp_path / "b", *changes, "trainer.total_training_steps=4")
    assert [step["step"] for step in rest] == [3, 4]
    assert scores(rest) == scores(straight[2:])
    assert rest[-1]["critic/vf_loss"] == straight[-1]["critic/vf_loss"]
    assert same_weights(whole, resumed)
    masters = resumed.critic_wg.workers[0].engine.optimizer.masters
    assert all(is_adapter(name) or name.startswith("score.") for name in masters)


def test_a_run_may_start_from_the_adapter_of_another(toy, tmp_path):
    changes = [*LORA, f"{ACTOR}.use_kl_loss=true"]
    _, first = toy_run(toy, tmp_path / "first", *changes, "trainer.save_freq=2")
    path = tmp_path / "first/checkpoints/global_step_2/actor/lora_adapter"
    start = [f"{ACTOR}.use_kl_loss=true", f"{MODEL}.lora_adapter_path={path}"]
    metrics, second = toy_run(toy, tmp_path / "second", *start, f"{ACTOR}.optim.lr=0.0")
    assert [step["actor/ref_distance"] < 1e-6 for step in metrics] == [True, True]
    found = weights(second)
    assert all(torch.equal(found[name], value) for name, value in weights(first).items())


def test_the_short_spelling_of_the_options_means_the_same(toy, tmp_path):
    peft = f"{ACTOR}.peft"
    spelled = [f"{peft}.peft_type=lora", f"{peft}.lora_rank=4", f"{peft}.lora_alpha=32"]
    targets = f"{peft}.target_modules=[q_proj,v_proj,k_proj,o_proj]"
    _, trainer = toy_run(toy, tmp_path, *spelled, targets, "trainer.total_training_steps=1")
    adapters = [name for name in weights(trainer) if is_adapter(name)]
    assert len(adapters) == 2 * 4 * 2  # layers, projections of attention, factors
    layer = trainer.actor_rollout_wg.workers[0].engine.module.model.layers[0].self_attn.q_proj
    assert (layer.r["default"], layer.scaling["default"]) == (4, 8.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_the_adapters_of_one(toy, tmp_path):
    changes = [*LORA, f"{ACTOR}.use_kl_loss=true", "trainer.save_freq=1"]
    ranks = ["trainer.n_gpus_per_node=2", "trainer.controller=local"]
    names = ["critic/score/mean", "actor/kl_loss", "actor/grad_norm", "actor/ref_distance"]
    alone, _ = toy_run(toy, tmp_path / "alone", *changes)
    expected = [[step[name] for name in names] for step in alone]
    for sharding in ("zero1", "full"):
        folder, sharded = tmp_path / sharding, f"{ACTOR}.fsdp_config.sharding={sharding}"
        both, _ = toy_run(toy, folder, *changes, *ranks, sharded)
        for step, values in zip(both, expected, strict=True):
            assert [step[name] for name in names] == pytest.approx(values, rel=1e-4, abs=1e-6)
        adapters = [
            load_file(
                run / "checkpoints/global_step_2/actor/lora_adapter/adapter_model.safetensors"
            )
            for run in (tmp_path / "alone", folder)
        ]
        for name, weight in adapters[0].items():
            torch.testing.assert_close(adapters[1][name], weight, rtol=0, atol=1e-5)
