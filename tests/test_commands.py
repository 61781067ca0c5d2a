"""The short names of commands, and the doctor."""

import io
import sys
from importlib import import_module

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from tests.tiny_tokenizer import save_tiny_model
from tests.toy import make_toy, toy_overrides, write_rows
from tests.trainer.sft_cases import as_arguments, engine_options, write_model
from verl import doctor
from verl.cli import COMMANDS, main


def test_each_short_name_is_a_module_that_can_be_run():
    for module, _ in COMMANDS.values():
        assert "main" in vars(import_module(module))


def test_a_misspelt_command_is_refused_with_the_one_that_was_meant(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl", "trian"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_help_of_training_fits_a_screen_and_names_the_plan(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl", "train", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert not ended.value.code
    assert printed.startswith("usage: verl train key=value")
    assert "trainer.dry_run=True" in printed
    assert printed.count("\n") < 24


def test_without_a_command_all_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl"])
    main()
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.fixture
def verl(monkeypatch, capsys, tmp_path):
    """`verl(...)` as in a shell in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["verl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return printed.out

    return run


@pytest.mark.slow
def test_each_command_has_help(verl):
    for name in COMMANDS:
        assert len(verl(name, "--help")) > 200


@pytest.mark.slow
def test_each_command_works_under_its_short_name(verl, tmp_path):
    toy = make_toy(tmp_path / "toy")
    options = [*toy_overrides(toy, tmp_path / "run"), "trainer.save_freq=1", "trainer.board=True"]
    verl("train", *options)
    run = tmp_path / "run" / "checkpoints"
    assert "bit for bit" in verl("replay", run, "--step", 2)
    assert "equal in all" in verl("diff", run, run)
    assert "update_actor" in verl("profile", run)
    assert "wrote" in verl("board", run, "--export", "page.html")
    assert "prints the plan" in verl("doctor", *options)
    folder = run / "global_step_2" / "actor"
    verl(*["merge", "merge", "--backend", "fsdp", "--target_dir", "merged", "--local_dir"], folder)
    model = ["trainer.n_gpus_per_node=1", "rollout.prompt_length=8", "rollout.response_length=8"]
    prompts = [{"prompt": "1-1=", "data_source": "sevens", "reward_model": {"ground_truth": "7"}}]
    pq.write_table(pa.Table.from_pylist(prompts), tmp_path / "prompts.parquet")
    files = ["data.path=prompts.parquet", "data.output_path=answers.parquet"]
    verl("generate", "model.path=merged", "data.n_samples=2", *files, *model)
    reward = f"custom_reward_function.path={toy / 'reward.py'}"
    assert "sevens" in verl("eval", "data.path=answers.parquet", reward)
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo data.train_batch_size=64\n")
    assert "data.train_batch_size=64" in verl("migrate", script)
    verl("sft", *as_arguments(engine_options(write_model(tmp_path / "chat"), tmp_path)))


def test_a_command_gets_its_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["verl", "board", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "holds no board.sqlite" in capsys.readouterr().err


def test_the_doctor_names_options_that_nobody_can_read():
    output = io.StringIO()
    console = Console(file=output, width=200)
    assert doctor.main(["actor_rollout_ref.actor.optim.betas=[0.9"], console) == 1
    assert "a value is no YAML: expected ',' or ']'" in output.getvalue()
    assert doctor.main(["trainer.devcie=cpu"], console) == 1
    assert "error  unknown option trainer.devcie\n" in output.getvalue()


def test_the_doctor_finds_this_machine_fit_to_train():
    output = io.StringIO()
    assert doctor.main([], Console(file=output, width=200)) == 0
    assert "torch" in output.getvalue()
    assert "no errors, " in output.getvalue()


def test_the_doctor_checks_a_configuration_for_this_machine(tmp_path):
    def ill(*options):
        found = list(doctor.check_configuration(options))
        return {f.name: (f.state, f.found, f.remedy) for f in found if f.state != "ok"}

    save_tiny_model(tmp_path / "model")
    data = write_rows(tmp_path / "train.jsonl", ["1+1="])
    fit = [f"data.train_files={data}", f"data.val_files={data}", "trainer.device=cpu"]
    fit += [f"actor_rollout_ref.model.path={tmp_path / 'model'}", "trainer.n_gpus_per_node=1"]
    small = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    small += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    small += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"]
    assert ill(*fit, *small, "algorithm.adv_estimator=grpo") == {}
    found = ill(*fit, *small, "algorithm.adv_estimator=grpo", "critic.optim.lr=0.1")
    assert found["critic.optim.lr"][0] == "note"
    found = ill(*fit, *small, "algorithm.adv_estimator=grop", "data.train_file=x")
    assert any("did you mean" in text for _, *texts in found.values() for text in texts)
    assert "algorithm.adv_estimator" in found
    output = io.StringIO()
    assert doctor.main(["data.train_files=/nowhere.parquet"], Console(file=output, width=80)) == 1
    assert (
        'error  data.train_files is "/nowhere.parquet", which does not exist' in output.getvalue()
    )
    assert "/nowhere.parquet" in output.getvalue()


def test_the_doctor_keeps_a_long_name_apart_from_what_it_found():
    output = io.StringIO()
    doctor.show(doctor.Finding("data.trian_files", "error", "unknown"), Console(file=output))
    assert output.getvalue() == "error  data.trian_files unknown\n"


def test_the_doctor_names_what_is_missing_and_the_way_out(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "nonesuch", "x; extra == 'a'"]
    )
    old, gone = doctor.check_requirements()
    assert (old.state, old.remedy) == ("error", 'pip install "torch>=99"')
    assert (gone.found, gone.remedy) == ("not installed", 'pip install "nonesuch"')
    (folder,) = doctor.check_folder("cache", doctor.Path("/proc/nowhere"))
    assert (folder.state, folder.remedy) == ("error", "choose a folder that is yours")
