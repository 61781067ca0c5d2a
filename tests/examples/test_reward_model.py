"""A reward model learns a planted preference, and a policy learns from the reward model."""

import random

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from examples.reward_model.train_reward_model import parse, train
from tests.tiny_tokenizer import CHARACTERS
from tests.toy import make_toy, toy_run
from verl.models.loading import load_reward_model
from verl.trainer.ppo.trainer import PPOTrainer

OTHERS = [letter for letter in CHARACTERS if letter != "7"]


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
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    parquet.write_table(planted_pairs(256, seed=1), folder / "train.parquet")
    parquet.write_table(planted_pairs(128, seed=2), folder / "test.parquet")
    history = train(
        parse(
            [
                f"--model={toy / 'model'}",
                f"--train_files={folder / 'train.parquet'}",
                f"--val_files={folder / 'test.parquet'}",
                f"--output_dir={folder / 'model'}",
                "--max_length=16",
                "--batch_size=32",
                "--micro_batch_size=16",
                "--epochs=3",
                "--lr=0.01",
                "--device=cpu",
            ]
        )
    )
    return folder / "model", history


def test_a_planted_preference_is_learned(trained):
    _, history = trained
    assert history[0]["val_accuracy"] == 0.5, "a fresh head prefers nothing"
    assert history[-1]["val_accuracy"] > 0.9
    assert history[-1]["loss"] < history[1]["loss"]


def test_the_folder_is_a_reward_model(trained):
    path, _ = trained
    assert load_reward_model(str(path)).score.weight.any()


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


def test_a_policy_learns_what_the_reward_model_prefers(toy, trained, tmp_path):
    path, _ = trained
    metrics, trainer = toy_run(
        toy,
        tmp_path,
        "reward_model.enable=true",
        f"reward_model.model.path={path}",
        "reward_model.model.input_tokenizer=null",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=10",
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
