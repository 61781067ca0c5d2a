"""From demonstrations to reinforcement through the real commands, in miniature."""

import json
import sys

import pytest

from examples.quickstart import reward as quickstart_reward
from examples.quickstart.make_data import question, rl_row, worked_out
from tests.trainer.sft_cases import as_arguments, write_model, write_rows
from verl.trainer import fsdp_sft_trainer, main_ppo

PROBLEMS = [(number, 2) for number in range(10, 26)]


def command(monkeypatch, module, values, folder):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["verl", *as_arguments(values)])
    module.main()


def reported(file, name):
    lines = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
def test_a_fine_tuned_adapter_is_merged_and_reinforced(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": question(problem), "response": worked_out(problem)} for problem in PROBLEMS]
    demonstrations = write_rows(tmp_path / "demonstrations.parquet", rows)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "sft.jsonl"))
    options = {
        "data.train_files": demonstrations,
        "data.val_files": demonstrations,
        "data.prompt_key": "prompt",
        "data.response_key": "response",
        "data.train_batch_size": 8,
        "data.max_length": 64,
        "model.partial_pretrain": str(write_model(tmp_path / "model")),
        "model.lora_rank": 8,
        "optim.lr": 3e-2,
        "trainer.total_training_steps": 8,
        "trainer.default_local_dir": str(tmp_path / "sft"),
        "trainer.logger": ["file"],
    }
    command(monkeypatch, fsdp_sft_trainer, options, tmp_path)
    model = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("the model is in ")
    losses = reported(tmp_path / "sft.jsonl", "train/loss")
    assert losses[-1] < losses[0]

    prompts = write_rows(tmp_path / "prompts.parquet", [rl_row(p, "train", 0) for p in PROBLEMS])
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "grpo.jsonl"))
    options = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 16,
        "custom_reward_function.path": quickstart_reward.__file__,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "trainer.total_training_steps": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": str(tmp_path / "grpo"),
        "trainer.logger": ["file"],
    }
    command(monkeypatch, main_ppo, options, tmp_path)
    assert reported(tmp_path / "grpo.jsonl", "training/global_step") == [1, 2]
    assert len(reported(tmp_path / "grpo.jsonl", "actor/grad_norm")) == 2
