"""Reward models learn planted preferences, and what they save rewards a policy."""

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.tiny_tokenizer import CHARACTERS
from tests.toy import toy_run
from verl.config.faults import ConfigError
from verl.models.loading import load_causal_lm, load_reward_model
from verl.trainer.main_rm import run_rm
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.sft.reward_model import bradley_terry_loss, pair_counts
from verl.utils.environment import temp_env_var

OTHERS = [letter for letter in CHARACTERS if letter != "7"]
IMPLICIT = ("objective.name=implicit", "objective.beta_train=0.5", "optim.lr=0.003")


def planted_pairs(num_pairs, seed):
    """The chosen response has more sevens; where they stand and what else is there is chance."""
    draw = random.Random(seed)

    def response(num_sevens):
        letters = ["7"] * num_sevens + draw.choices(OTHERS, k=8 - num_sevens)
        return "".join(draw.sample(letters, 8))

    rows = []
    for _ in range(num_pairs):
        fewer = draw.randint(0, 4)
        more = draw.randint(fewer + 2, 8)
        prompt = f"{draw.randint(0, 9)}+{draw.randint(0, 9)}="
        rows.append({"prompt": prompt, "chosen": response(more), "rejected": response(fewer)})
    return rows


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for name, count, seed in (("train", 256, 1), ("test", 128, 2)):
        lines = [json.dumps(row) + "\n" for row in planted_pairs(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def settings(toy, pairs, output, *changes):
    return [
        f"data.train_files={pairs / 'train.jsonl'}",
        f"data.val_files={pairs / 'test.jsonl'}",
        "data.max_length=16",
        "data.train_batch_size=32",
        "data.micro_batch_size_per_gpu=16",
        f"model.path={toy / 'model'}",
        "model.enable_gradient_checkpointing=false",
        "optim.lr=0.01",
        "trainer.total_training_steps=16",
        "trainer.test_freq=8",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={output / 'checkpoints'}",
        *changes,
    ]


def train(toy, pairs, output, *changes):
    """The metrics of each step, and the folder of the last one's weights."""
    output.mkdir(exist_ok=True)
    log = output / "metrics.jsonl"
    log.unlink(missing_ok=True)
    with temp_env_var("VERL_FILE_LOGGER_PATH", str(log)):
        run_rm(OmegaConf.from_dotlist(settings(toy, pairs, output, *changes)))
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    metrics = [line["data"] for line in lines]
    steps = (output / "checkpoints").glob("global_step_*")
    last = max(steps, key=lambda step: int(step.name.rpartition("_")[2]), default=None)
    return metrics, last and last / "huggingface"


@pytest.fixture(scope="module")
def bradley_terry(toy, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bradley_terry")
    return train(toy, pairs, folder, "trainer.total_training_steps=24")


def test_losses_and_counts_of_pairs_are_those_of_the_formula():
    scores = torch.tensor([1.0, 0.5, -2.0, 1.0, 3.0, 3.0], dtype=torch.float64)
    by_hand = sum(math.log(1 + math.exp(-margin)) for margin in (0.5, -3.0, 0.0))
    assert abs(bradley_terry_loss(scores).item() - by_hand) < 1e-12
    assert pair_counts(scores) == {"right": 1.5, "margin": -2.5}


def test_a_planted_preference_is_learned_and_the_folder_is_a_reward_model(bradley_terry, capsys):
    metrics, folder = bradley_terry
    assert metrics[0]["train/loss"] == pytest.approx(math.log(2)), "a fresh head prefers nothing"
    assert metrics[0]["train/accuracy"] == 0.5
    assert metrics[-1]["val/accuracy"] > 0.9
    assert metrics[-1]["val/margin"] > 1
    model = load_reward_model(str(folder))
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert model.score.weight.any()


def test_the_implicit_objective_learns_it_too_and_saves_a_language_model(toy, pairs, tmp_path):
    metrics, folder = train(toy, pairs, tmp_path, *IMPLICIT)
    assert metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[-1]["val/accuracy"] > 0.8
    load_causal_lm(str(folder))


@pytest.mark.parametrize("objective", [(), IMPLICIT])
def test_training_does_not_depend_on_the_split_into_micro_batches(toy, pairs, tmp_path, objective):
    runs = [
        train(
            toy,
            pairs,
            tmp_path / str(size),
            *objective,
            "trainer.total_training_steps=2",
            f"data.micro_batch_size_per_gpu={size}",
            "data.val_files=null",
        )[0]
        for size in (32, 3)
    ]
    for one, other in zip(*runs, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/margin", "train/accuracy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_did_not_stop(toy, pairs, tmp_path):
    changes = ("trainer.save_freq=8", "trainer.max_ckpt_to_keep=2")
    whole, _ = train(toy, pairs, tmp_path, *changes)
    folder = tmp_path / "checkpoints"
    named = f"trainer.resume_from_path={folder / 'global_step_8'}"
    rest, _ = train(toy, pairs, tmp_path, *changes, "trainer.resume_mode=resume_path", named)
    assert len(rest) == 8
    for one, other in zip(rest, whole[8:], strict=True):
        same = [name for name in one if "time" not in name and "per_second" not in name]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}


def test_adapters_are_refused_by_name(toy, pairs, tmp_path):
    with pytest.raises(ConfigError, match=r"model.lora_rank is 8; a reward model is trained with"):
        train(toy, pairs, tmp_path, "model.lora_rank=8")


def test_a_plan_is_printed_and_nothing_else_happens(toy, pairs, tmp_path, capsys):
    assert train(toy, pairs, tmp_path, "trainer.dry_run=true") == ([], None)
    said = capsys.readouterr().out
    assert "prompt -> chosen over rejected, objective bradley_terry" in said


class CountsSevens(PPOTrainer):
    """Keeps the share of sevens among the sampled tokens of each step."""

    def init_workers(self):
        super().init_workers()
        self.shares = []

    def update(self, batch, step):
        (seven,) = self.tokenizer("7")["input_ids"]
        mask = batch.batch["response_mask"].bool()
        self.shares.append((batch.batch["responses"][mask] == seven).float().mean().item())
        return super().update(batch, step)


def test_without_a_learning_rate_nothing_is_preferred(toy, pairs, tmp_path):
    metrics, _ = train(toy, pairs, tmp_path, "optim.lr=0", "trainer.total_training_steps=8")
    assert metrics[-1]["val/accuracy"] == 0.5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("objective", [(), IMPLICIT])
def test_two_ranks_under_torchrun_train_as_one_process_does(toy, pairs, tmp_path, objective):
    gentle = (*objective, "optim.lr=1e-4", "trainer.total_training_steps=4")
    expected, folder = train(toy, pairs, tmp_path / "one", *gentle)
    two = tmp_path / "two"
    two.mkdir()
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = settings(toy, pairs, two, *gentle, "trainer.n_gpus_per_node=2")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "verl.trainer.main_rm", *words],
        cwd=two,
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(two / "metrics.jsonl")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (two / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["data"] for line in lines]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/margin", "val/accuracy"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    saved = next((two / "checkpoints").glob("global_step_4")) / "huggingface/model.safetensors"
    theirs, ours = load_file(saved), load_file(folder / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_policy_learns_what_the_reward_model_prefers(toy, bradley_terry, tmp_path):
    _, folder = bradley_terry
    metrics, trainer = toy_run(
        toy,
        tmp_path,
        "reward_model.enable=true",
        f"reward_model.model.path={folder}",
        "reward_model.model.input_tokenizer=null",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=15",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "data.val_files=[]",
        trainer_class=CountsSevens,
    )
    rewards = [step["critic/score/mean"] for step in metrics]
    assert rewards[-1] > rewards[0] + 2
    assert trainer.shares[0] < 0.1
    assert trainer.shares[-1] > 0.5
