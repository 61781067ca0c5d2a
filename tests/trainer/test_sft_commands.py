"""The three commands of supervised fine-tuning, and what they refuse."""

import sys
from pathlib import Path

import pytest

from tests.compat.test_light_imports import loaded_by
from tests.trainer.sft_cases import (
    as_arguments,
    engine_options,
    nested,
    options,
    write_model,
)
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.trainer import fsdp_sft_trainer, sft_trainer, sft_trainer_ray


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def command(monkeypatch, module, values, folder):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["sft", *as_arguments(values)])
    module.main()


def fsdp_command(monkeypatch, model_folder, folder, **changes):
    values = options(model_folder, folder, **{"trainer.logger": ["console"], **changes})
    command(monkeypatch, fsdp_sft_trainer, values, folder)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ulysses_sequence_parallel_size", 2),
        ("model.fsdp_config.cpu_offload", True),
        ("trainer.default_hdfs_dir", "hdfs://there"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model_folder, tmp_path, option, value):
    values = nested(options(model_folder, tmp_path, **{option: value}))
    with pytest.raises(ConfigError, match=f'{option} is "?{value}'):
        fsdp_sft_trainer.run_sft(load_config(values, SFTConfig).checked())


@pytest.mark.parametrize("module", [sft_trainer, sft_trainer_ray])
@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("engine.strategy", "veomni", "engine=fsdp optim=fsdp, or with engine=megatron"),
        ("engine.ulysses_sequence_parallel_size", 2, "must divide the 1 ranks"),
        ("engine.param_offload", True, "weights and optimizer stay on the device"),
        ("model.tiled_mlp.enabled", True, "MLP layers run over whole sequences"),
        ("trainer.save_freq", "sometimes", "a number of steps or after_each_epoch"),
        ("trainer.resume_mode", "resume_path", "must name a folder .../global_step_N"),
        ("data.max_token_len_per_gpu", 15, "it must be at least that"),
    ],
)
def test_the_engine_commands_refuse_by_name(
    model_folder, tmp_path, module, option, value, complaint
):
    values = nested(engine_options(model_folder, tmp_path, **{option: value}))
    with pytest.raises(ConfigError, match=complaint):
        module.run_sft(load_config(values, SFTEngineConfig).checked())


def test_the_command_trains(model_folder, tmp_path, monkeypatch, capsys):
    fsdp_command(monkeypatch, model_folder, tmp_path, **{"optim.lr_scheduler": "constant"})
    lines = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("step:4 - train/loss:") for line in lines)
    assert "COMMITTED step=4" in lines
    folder = lines[-1].removeprefix("the model is in ")
    assert (Path(folder) / "model.safetensors").exists()


def test_the_engine_command_trains_and_names_what_has_no_effect(
    model_folder, tmp_path, monkeypatch, capsys
):
    changes = {"trainer.logger": ["console"], "engine.fsdp_size": 4, "trainer.n_gpus_per_node": 2}
    values = engine_options(model_folder, tmp_path, **changes)
    command(monkeypatch, sft_trainer, values, tmp_path)
    output, notes = capsys.readouterr()
    assert "step:4 - train/loss:" in output
    assert output.strip().splitlines()[-1].startswith("the model is in ")
    assert "the configuration says 2 devices; this run was started on 1" in notes
    assert "engine.fsdp_size has no effect here" in notes
    assert notes.count("has no effect here") == 1


def test_the_last_lines_sum_the_run_up(model_folder, tmp_path, monkeypatch, capsys):
    fsdp_command(monkeypatch, model_folder, tmp_path)
    *_, steps, tokens, speed, loss, where = capsys.readouterr().out.strip().splitlines()
    assert steps.split(maxsplit=1) == ["steps", "4 of 4"]
    # a row is <user> a + b <assistant> c <end>, with two digits in c from 10 on
    assert 4 * 8 * 7 <= int(tokens.split()[1].replace(",", "")) <= 4 * 8 * 8
    assert speed.endswith("tokens/s, no MFU")  # no peak is published for a CPU
    assert "at step 1" in loss
    assert "on held-out rows" in loss
    assert where.startswith("the model is in ")


def test_a_finished_run_says_that_nothing_is_left(model_folder, tmp_path, monkeypatch, capsys):
    fsdp_command(monkeypatch, model_folder, tmp_path)
    fsdp_command(monkeypatch, model_folder, tmp_path)
    assert "nothing left to train: step 4 of 4 was done" in capsys.readouterr().out


@pytest.mark.parametrize("module", [fsdp_sft_trainer, sft_trainer, sft_trainer_ray])
def test_a_misspelt_key_is_refused(model_folder, tmp_path, monkeypatch, capsys, module):
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, module, {"data.train_bach_size": 8}, tmp_path)
    assert "did you mean data.train_batch_size?" in capsys.readouterr().err


def test_mistakes_are_found_before_torch_is_loaded():
    commands = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
    loaded = loaded_by(*(f"verl.trainer.{name}" for name in commands))
    assert not {"torch", "transformers", "ray"} & loaded


def test_the_command_refuses_a_file_that_is_not_there(model_folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        fsdp_command(monkeypatch, model_folder, tmp_path, **{"data.train_files": "row.parquet"})
    assert "the closest existing path is" in capsys.readouterr().err


def test_the_command_names_a_bad_row_without_a_traceback(
    model_folder, tmp_path, monkeypatch, capsys
):
    with pytest.raises(SystemExit, match="65"):
        fsdp_command(monkeypatch, model_folder, tmp_path, **{"data.max_length": 6})
    assert "rows.parquet:1 has 7 tokens" in capsys.readouterr().err


def test_the_command_names_options_without_effect(model_folder, tmp_path, monkeypatch, capsys):
    changes = {"data.balance_dp_token": True, "model.lora_alpha": 32}
    fsdp_command(monkeypatch, model_folder, tmp_path, **changes)
    notes = capsys.readouterr().err
    assert "data.balance_dp_token has no effect here" in notes
    assert "model.lora_alpha has no effect here" in notes
    assert notes.count("has no effect here") == 2


def test_a_dry_run_prints_the_plan_and_trains_nothing(model_folder, tmp_path, capsys):
    values = nested(options(model_folder, tmp_path, **{"trainer.dry_run": True}))
    fsdp_sft_trainer.run_sft(load_config(values, SFTConfig).checked())
    assert "8 rows, 8 rows at a time" in capsys.readouterr().out
    values = nested(engine_options(model_folder, tmp_path, **{"trainer.dry_run": True}))
    sft_trainer.run_sft(load_config(values, SFTEngineConfig).checked())
    plan = capsys.readouterr().out
    assert "8 rows, 64 tokens at a time" in plan
    assert "conversations in messages" in plan
    assert not (tmp_path / "checkpoints").exists()
