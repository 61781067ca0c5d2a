"""Runs of other programs become commands of ours, and their files are only read."""

import importlib.util
from pathlib import Path

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import family
from verl.migrate import openrlhf, trl
from verl.migrate.__main__ import main, migrate, mistakes, page
from verl.migrate.reading import Unreadable, flags, read

DOCS = Path(__file__).resolve().parents[2] / "docs"
A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
PYTHON = """
import os
from trl import GRPOConfig, GRPOTrainer
LR = 1e-5
open(os.environ["WITNESS"], "w").write("this file was run")
args = GRPOConfig(
    learning_rate=LR, num_generations=4, per_device_train_batch_size=8, beta=0.04,
    gradient_accumulation_steps=2, steps_per_generation=4, loss_type="dr_grpo",
    max_steps=how_many(), min_p=0.1, epsilon=0.1,
)
GRPOTrainer(model="Qwen/Qwen2-0.5B", args=args, reward_funcs=[mine], peft_config=LoraConfig(r=8))
"""
SHELL = """#!/bin/bash
# python -m verl.trainer.main_eval is a comment
SIZE=${SIZE:-64}
NAME='a b'
COMMON=(
    data.train_batch_size=$SIZE
    algorithm.adv_estimator=grpo  # the usual
)
python3 -m verl.trainer.main_ppo "${COMMON[@]}" \\
    data.train_files=$HOME/x.parquet trainer.experiment_name="$NAME" \\
    actor_rollout_ref.actor.tis_imp_ratio_cap=2.0 critic.fsdp.param_offload=True \\
    +actor_rollout_ref.actor.qat.enable=True trainer.no_such_key=1 $@ 2>&1 | tee log
"""
FLAGS = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain m --train_batch_size 64 \\
   --n_samples_per_prompt 8 --rollout_batch_size 16 --init_kl_coef 1e-3 --use_kl_loss \\
   --kl_estimator k3 --advantage_estimator group_norm --eps_clip_low_high 0.2 0.3 --packing_samples
"""


def migrated(tmp_path, name, text, num_gpus=2):
    path = tmp_path / name
    path.write_text(text)
    (found,) = read(path).values()
    return migrate(found, num_gpus)


def test_trl_counts_completions_and_we_count_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("WITNESS", str(tmp_path / "witness"))
    migration = migrated(tmp_path, "train.py", PYTHON)
    values = migration.values
    assert values["data.train_batch_size"] == 8 * 2 * 4 // 4
    assert values[f"{A}.ppo_mini_batch_size"] == 8 * 2 * 2 // 4
    assert values[f"{R}.n"] == 4
    assert values[f"{A}.optim.lr"] == 1e-5
    assert (values[f"{A}.clip_ratio_low"], values[f"{A}.clip_ratio_high"]) == (0.1, 0.1)
    assert values[f"{A}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert values["actor_rollout_ref.model.lora_rank"] == 8
    assert values["data.max_response_length"] == 256, "TRL's default, which is not ours"
    assert {name for name, _ in migration.missing} == {"max_steps", "min_p", "reward_funcs"}
    assert list(mistakes(migration)) == []
    assert not (tmp_path / "witness").exists()


def test_a_yaml_of_trl_is_read_too(tmp_path):
    text = "model_name_or_path: m\nlearning_rate: 1e-5\nnum_generations: 8\nscale_rewards: batch\n"
    text += "repetition_penalty: 1.1\n"
    migration = migrated(tmp_path, "grpo.yaml", text, num_gpus=1)
    assert migration.values[f"{R}.repetition_penalty"] == 1.1
    assert migration.values[f"{A}.optim.lr"] == 1e-5
    assert migration.missing[0][0] == "scale_rewards"


def test_a_script_of_verl_gets_the_keys_of_today(tmp_path):
    migration = migrated(tmp_path, "run.sh", SHELL)
    values = migration.values
    assert values["data.train_batch_size"] == 64
    assert values["data.train_files"] == "$HOME/x.parquet"
    assert values["trainer.experiment_name"] == "a b"
    assert values["critic.model.fsdp_config.param_offload"] is True
    assert values["algorithm.rollout_correction.rollout_is"] == "token"
    reasons = dict(migration.missing)
    assert "quantization-aware" in reasons["actor_rollout_ref.actor.qat.enable"]
    assert "unknown option" in reasons["trainer.no_such_key"]


def test_a_yaml_of_verl_gets_the_keys_of_today(tmp_path):
    text = "critic: {fsdp: {param_offload: true}}\ndata: {train_batch_size: 8}\n"
    migration = migrated(tmp_path, "run.yaml", text)
    assert migration.values == {
        "critic.model.fsdp_config.param_offload": True,
        "data.train_batch_size": 8,
    }


@pytest.mark.parametrize(
    "module",
    [
        "verl.trainer.main_ppo",
        "verl.experimental.one_step_off_policy.main_ppo",
        "recipe.one_step_off_policy.main_ppo",
        "verl.experimental.fully_async_policy.fully_async_main",
        "verl.experimental.transfer_queue.main_ppo",
        "recipe.dapo.main_dapo",
        "recipe.prime.main_prime",
        "recipe.spin.main_spin",
        "verl.trainer.main_generation",
        "verl.trainer.main_eval",
        "verl.trainer.sft_trainer",
    ],
)
def test_a_command_that_is_here_stays_the_command(tmp_path, module):
    migration = migrated(tmp_path, "run.sh", f"python3 -m {module} trainer.nnodes=1\n")
    assert (migration.module, migration.changes) == (module, [])
    assert importlib.util.find_spec(module) is not None


def test_a_program_of_others_is_read_as_ours_and_said_to_be_theirs(tmp_path):
    migration = migrated(tmp_path, "run.sh", "python -m recipe.mine.main_mine trainer.nnodes=1\n")
    assert migration.module == "verl.trainer.main_ppo"
    assert migration.changes[0][0] == "recipe.mine.main_mine"


def test_a_command_with_flags_is_the_same_here(tmp_path, capsys):
    path = tmp_path / "merge.sh"
    path.write_text("python3 -m verl.model_merger merge --backend fsdp --local_dir a\n")
    assert main([str(path)]) == 0
    said = capsys.readouterr().out.split("\n", 1)[1]
    assert said.replace(" \\\n    ", " ") == (
        "python -m verl.model_merger merge --backend fsdp --local_dir a\n"
    )


def test_openrlhf_counts_samples_per_update(tmp_path):
    values = migrated(tmp_path, "run.sh", FLAGS).values
    assert values[f"{A}.ppo_mini_batch_size"] == 64 // 8
    assert values["data.train_batch_size"] == 16
    assert (values[f"{A}.use_kl_loss"], values[f"{A}.kl_loss_type"]) == (True, "low_var_kl")
    assert (values[f"{A}.clip_ratio_low"], values[f"{A}.clip_ratio_high"]) == (0.2, 0.3)
    assert values["actor_rollout_ref.model.use_remove_padding"] is True


SECTIONED_FLAGS = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --train.batch_size 64 \\
   --rollout.n_samples_per_prompt 8 --rollout.batch_size 16 --algo.kl.init_coef 1e-3 \\
   --algo.kl.use_loss --algo.kl.estimator k3 --algo.advantage.estimator group_norm \\
   --actor.eps_clip_low_high 0.2 0.3 --ds.packing_samples --actor.adam.lr 1e-6 \\
   --critic.adam.lr 9e-6 --logger.wandb.key secret --ds.deepcompile
"""


def test_flags_with_sections_are_the_same_run(tmp_path):
    older, newer = (migrated(tmp_path, "run.sh", text) for text in (FLAGS, SECTIONED_FLAGS))
    rates = {f"{A}.optim.lr": 1e-6, "critic.optim.lr": 9e-6}
    logger = {"trainer.logger": ["console", "wandb"]}
    assert newer.values == {**older.values, **rates, **logger}
    assert newer.missing == [("ds.deepcompile", "not known here")]
    assert ("actor.model_name_or_path", "actor_rollout_ref.model.path=m") in newer.maps
    assert not any("secret" in text for pair in newer.maps for text in pair)


def test_flags_have_one_value_several_or_none():
    assert flags(
        ["--a", "1", "--b", "--c=x", "--d", "0.1", "0.2", "--e-f", "1e-6", "--g.h", "1"]
    ) == {
        "a": 1,
        "b": True,
        "c": "x",
        "d": "0.1 0.2",
        "e_f": 1e-6,
        "g.h": 1,
    }


@pytest.mark.parametrize("table", [trl.TABLE, openrlhf.TABLE])
def test_every_row_leads_to_an_option_or_says_why_not(table):
    keys = family(PPOConfig).keys
    for name, row in table.items():
        assert not row.target or row.target in keys, name
        assert row.target or row.convert or row.note, name


def test_the_command_is_printed_and_what_is_unreadable_is_said(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(SHELL)
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "python -m verl.trainer.main_ppo \\\n" in said
    assert '"data.train_files=$HOME/x.parquet"' in said
    assert "'trainer.experiment_name=a b'" in said
    path.write_text("echo hello\n")
    assert main([str(path)]) == 2
    with pytest.raises(Unreadable, match="no command of a known program"):
        read(path)
    assert main([str(tmp_path / "nothing.sh")]) == 2


def test_the_page_is_current():
    assert (DOCS / "migration.md").read_text() == page()


PAGE_OF_SOMEBODY = """
See https://verl.readthedocs.io for "more.
```bash
python -m verl.trainer.<command> <config.path>=<value> ...
```
```yaml
model: {path: m}
optim: {lr: 1e-5}
```
```bash
python -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    ...
```
```python
print("hello")
```
"""


def test_each_block_of_a_page_that_holds_a_run_is_migrated(tmp_path, capsys):
    path = tmp_path / "guide.txt"
    path.write_text(PAGE_OF_SOMEBODY)
    assert main([str(path)]) == 0
    first, second = capsys.readouterr().out.split("\n\n# ---- ")
    assert first.startswith(f"# ---- {path}:6\n")
    assert "python -m verl.trainer.fsdp_sft_trainer" in first
    assert "optim.lr=1e-5" in first
    assert second == (
        f"{path}:10\n# From verl (verl.trainer.main_ppo):\n"
        "python -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=grpo\n"
    )
    path.write_text("```python\nprint(1)\n```\n")
    with pytest.raises(Unreadable, match="none of its blocks"):
        read(path)
