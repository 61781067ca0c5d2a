"""Conversations: both trainers read them, and learn from them what they learn from columns."""

import math

import pytest
import torch

from tests.trainer.sft_cases import (
    CONVERSATIONS,
    engine_trainer,
    trainer,
    weights,
    write_model,
    write_rows,
)
from verl.trainer.sft.batches import load_rows


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


SAME = {
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
}


def test_a_conversation_of_two_turns_is_a_prompt_and_its_response(model_folder, tmp_path):
    by_columns = trainer(model_folder, tmp_path)
    by_columns.fit()
    by_turns = engine_trainer(model_folder, tmp_path / "turns", **SAME)
    by_turns.fit()
    for name, value in weights(by_columns).items():
        torch.testing.assert_close(weights(by_turns)[name], value, rtol=0, atol=1e-5)
    assert by_turns.summary.val_loss == pytest.approx(by_columns.summary.val_loss, rel=1e-5)


def test_the_columns_trainer_reads_conversations_when_told(model_folder, tmp_path):
    rows = [{"talk": row["messages"]} for row in CONVERSATIONS]
    file = write_rows(tmp_path / "talk.parquet", rows)
    changes = {
        "data.train_files": file,
        "data.val_files": file,
        "data.multiturn.enable": True,
        "data.multiturn.messages_key": "talk",
    }
    by_turns = trainer(model_folder, tmp_path, **changes)
    by_columns = trainer(model_folder, tmp_path)
    found, expected = by_turns.train_step(1), by_columns.train_step(1)
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-6)
    for name, value in weights(by_columns).items():
        torch.testing.assert_close(weights(by_turns)[name], value, rtol=0, atol=1e-6)


def test_every_turn_of_the_assistant_is_trained_and_no_other(model_folder, tmp_path):
    turns = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+3"},
        {"role": "assistant", "content": "5"},
    ]
    file = write_rows(tmp_path / "long.parquet", [{"messages": turns}] * 8)
    changes = {"data.train_files": file, "data.val_files": None, "data.max_length": 32}
    sft = engine_trainer(model_folder, tmp_path, **changes)
    batch = load_rows(sft.train_dataset, [0])
    trained = batch["responses"][batch["response_mask"].bool()]
    assert sft.tokenizer.decode(trained) == "2</s>5</s>"
    with torch.no_grad():
        sft.engine.module.lm_head.weight.zero_()
    metrics = sft.train_step(1)
    assert metrics["train/loss"] == pytest.approx(math.log(260))  # a guess among 260 tokens
    assert metrics["train/trained_tokens"] == 8 * 4
    assert metrics["train/global_tokens"] == 8 * 14  # 4 asked and 3 said, twice


def test_padding_in_the_dataset_changes_nothing(model_folder, tmp_path):
    losses = []
    for mode in ("no_padding", "right"):
        sft = engine_trainer(model_folder, tmp_path, **{"data.pad_mode": mode})
        losses.append(sft.mean_loss(sft.val_dataset))
    assert losses[0] == losses[1] > 0


def test_validation_and_saving_may_follow_epochs(model_folder, tmp_path, monkeypatch):
    changes = {
        "trainer.total_training_steps": None,
        "trainer.total_epochs": 2,
        "data.train_max_samples": 16,
        "trainer.save_freq": "after_each_epoch",
        "trainer.test_freq": 3,
    }
    sft = engine_trainer(model_folder, tmp_path, **changes)
    validated = []
    measure = sft.mean_loss

    def noting(dataset):
        validated.append(sft.summary.last_step + 1)
        return measure(dataset)

    monkeypatch.setattr(sft, "mean_loss", noting)
    sft.fit()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert sft.total_steps == 4
    assert saved == ["global_step_2", "global_step_4"]
    assert validated == [3, 4]


@pytest.mark.parametrize("is_discrete", [False, True])
def test_the_steps_of_the_interval_are_profiled(model_folder, tmp_path, is_discrete):
    changes = {
        "trainer.profile_interval": [2, 3],
        "profiler.enable": True,
        "profiler.ranks": [0],
        "profiler.save_path": str(tmp_path / "profile"),
        "profiler.tool_config.torch.contents": ["cpu"],
        "profiler.tool_config.torch.discrete": is_discrete,
    }
    engine_trainer(model_folder, tmp_path, **changes).fit()
    found = sorted(path.name for path in (tmp_path / "profile").iterdir())
    if is_discrete:
        assert found == ["train_step_step2_rank0.json", "train_step_step2_rank0_1.json"]
    else:
        assert found == ["sft_step2_rank0.json"]
