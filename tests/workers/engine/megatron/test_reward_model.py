"""A reward model on Megatron gives the scores of one device, alone and beside a policy."""

import pytest
import torch

from tests.tiny_tokenizer import tiny_tokenizer
from tests.toy import make_toy, toy_run
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.reward_model.models import reward_model, save
from tests.workers.roles.test_reward_model import batch
from verl.config.engine import McoreEngineConfig
from verl.config.reward import (
    FSDPRewardModelConfig,
    FSDPRewardModelModelConfig,
    McoreRewardModelConfig,
    RewardModelModelConfig,
)
from verl.workers.roles import RewardModelWorker


def scores(config, rows):
    worker = RewardModelWorker(config, device="cpu")
    worker.init_model()
    return worker.compute_rm_score(rows).batch["rm_scores"]


def on_device(path, rows):
    model = FSDPRewardModelModelConfig(path=path, input_tokenizer=None)
    return scores(FSDPRewardModelConfig(enable=True, model=model), rows)


def on_megatron(path, rows, **sizes):
    model = RewardModelModelConfig(path=path, input_tokenizer=None)
    section = McoreEngineConfig(override_transformer_config={}, **sizes)
    cut = {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 14}
    config = McoreRewardModelConfig(enable=True, model=model, megatron=section, **cut)
    return scores(config, rows)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_one_rank_scores_as_one_device_does(kind, tmp_path, one_rank):
    path = save(reward_model("llama", kind=kind), tmp_path)
    expected = on_device(path, batch())
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(on_megatron(path, batch()), expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_head_is_refused(tmp_path, one_rank):
    path = save(reward_model("llama").model, tmp_path)
    with pytest.raises(ValueError, match=r"has no score\.weight"):
        on_megatron(path, batch())


SIZES = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_score_as_one_device_does(name, tmp_path):
    """One of two data ranks has rows for one pass more than the other."""
    path, rows = save(reward_model("llama"), tmp_path / "model"), batch()
    expected = on_device(path, rows)

    def work(rank):
        own = rows[[1, 1, 0]] if name != "data" or rank == 0 else rows[[0, 0, 0]]
        return on_megatron(path, own, **SIZES[name]).tolist()

    first, second = run_on_two_ranks(work, tmp_path)
    shares = {0: [1, 1, 0], 1: [0, 0, 0] if name == "data" else [1, 1, 0]}
    for found, share in zip((first, second), shares.values(), strict=True):
        torch.testing.assert_close(torch.tensor(found), expected[share], rtol=1e-5, atol=1e-5)


# ---- a whole run ---------------------------------------------------------------------------------

ACTOR = "actor_rollout_ref.actor"
TENSOR = "megatron.tensor_model_parallel_size=2"
MEGATRON = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.{TENSOR}", f"reward_model.{TENSOR}"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_grpo_with_a_reward_model_on_two_tensor_ranks_has_the_curve_of_fsdp(tmp_path):
    toy = make_toy(tmp_path / "toy")
    path = save(reward_model("llama"), tmp_path / "rm", tiny_tokenizer())
    options = [
        "trainer.n_gpus_per_node=2",
        "trainer.controller=local",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "trainer.total_training_steps=3",
        "reward_model.enable=true",
        f"reward_model.model.path={path}",
        "reward_model.model.input_tokenizer=null",
        "custom_reward_function.path=null",
        f"{ACTOR}.optim.lr=0.001",
    ]
    expected, _ = toy_run(toy, tmp_path / "fsdp", *options)
    found, _ = toy_run(toy, tmp_path / "megatron", *options, *MEGATRON)
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        ours, theirs = ([step[name] for step in steps] for steps in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    assert len(found) == 3
