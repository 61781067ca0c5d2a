"""The command line: what Hydra gets, what is refused, and how a command ends."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.config.composing import CONFIG_DIR, from_command_line
from verl.config.command import Override, rewrite
from verl.config.faults import ConfigError
from verl.config.ppo import PPOConfig
from verl.trainer import main_ppo

REPOSITORY = CONFIG_DIR.parents[2]


def rewritten(*arguments):
    return rewrite(list(arguments), "ppo_trainer", CONFIG_DIR)


def run_main(monkeypatch, *arguments):
    """The command in this process; gives its exit code."""
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    try:
        main_ppo.main()
    except SystemExit as end:
        return end.code
    return 0


def run_process(*arguments, cwd=REPOSITORY):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def test_options_of_ours_get_the_prefix_that_always_works():
    arguments = rewritten("data.seed=1", "+data.gen_batch_size=2", "++trainer.nnodes=1").arguments
    assert arguments == ["++data.seed=1", "++data.gen_batch_size=2", "++trainer.nnodes=1"]


def test_hydras_own_arguments_pass_through():
    given = [
        "--config-path=config",
        "--config-name",
        "ppo_megatron_trainer.yaml",
        "--multirun",
        "--cfg",
        "job",
        "hydra.run.dir=out",
        "hydra/job_logging=none",
        "actor@actor_rollout_ref.actor=megatron_actor",
        "critic=dp_critic",
        "~data.seed",
    ]
    result = rewritten(*given)
    assert (result.arguments, result.faults) == (given, [])


def test_keys_that_the_files_lack_need_no_plus():
    """Every key that the public documentation adds with `+` is an option of ours."""
    keys = [
        "data.gen_batch_size",
        "data.cache_dir",
        "data.need_tools_kwargs",
        "data.chat_template_func",
        "data.filter_prompts",
        "data.output_path",
        "data.experiment_name",
        "custom_reward_function.reward_kwargs.a",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "reward_model.max_concurrent",
        "reward_model.max_rpm",
        "reward_model.truncation",
        "algorithm.filter_groups.enable",
        "algorithm.filter_groups.max_num_gen_batches",
        "trainer.wandb_proxy",
        "trainer.remove_previous_ckpt_in_save",
        "actor_rollout_ref.rollout.repetition_penalty",
        "actor_rollout_ref.rollout.limit_images",
        "actor_rollout_ref.rollout.enable_sleep_mode",
        "actor_rollout_ref.rollout.server.timeout",
        "actor_rollout_ref.rollout.sglang_engine_mode",
        "actor_rollout_ref.rollout.custom.anything",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.any",
        "actor_rollout_ref.actor.ppo_infer_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.use_rollout_log_probs",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
        "actor_rollout_ref.actor.optim.grad_clip",
        "actor_rollout_ref.model.lora.rank",
        "actor_rollout_ref.model.override_config.attn_implementation",
        "actor_rollout_ref.actor.megatron.override_transformer_config.any",
        "transfer_queue.num_global_batch",
        "ray_kwargs.ray_init.runtime_env.env_vars",
        "critic.ppo_infer_micro_batch_size_per_gpu",
    ]
    plain, added = (
        rewritten(*(f"{key}=1" for key in keys)),
        rewritten(*(f"+{key}=1" for key in keys)),
    )
    assert plain.faults == []
    assert plain.arguments == added.arguments == [f"++{key}=1" for key in keys]


def test_shell_completion_is_hydras():
    assert rewritten("--shell-completion", "install=bash").arguments[1] == "install=bash"


def test_values_are_not_touched():
    value = "data.train_files=['/a b/x=1.parquet','y']"
    assert rewritten(value).arguments == [f"++{value}"]
    assert Override.parse("a.b=c=d") == Override("", "a.b", "c=d")


@pytest.mark.parametrize("path", ["/home/jörg/日本/train.parquet", "day=1/a b.parquet", "a&b.json"])
def test_paths_that_hydra_has_no_words_for_need_no_quotes(path):
    composed = from_command_line(f"data.train_files={path}", "data.val_files=null")
    assert (composed.config.data.train_files, composed.config.data.val_files) == (path, None)


def test_an_interrupt_ends_the_command_without_a_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_ppo, "run", interrupt)
    assert run_main(monkeypatch, "trainer.device=cpu") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_old_keys_become_todays():
    result = rewritten("rollout.n=8", "reward_model.reward_fn.path=r.py")
    assert result.arguments == [
        "++actor_rollout_ref.rollout.n=8",
        "++custom_reward_function.path=r.py",
    ]
    assert result.renames == {
        "rollout.n": "actor_rollout_ref.rollout.n",
        "reward_model.reward_fn.path": "custom_reward_function.path",
    }


def test_an_old_key_whose_value_changes_too_is_left_to_loading():
    composed = from_command_line("rollout.multi_turn.max_turns=4", "rollout.mode=sync")
    turns = composed.config.actor_rollout_ref.rollout.multi_turn
    assert (turns.max_assistant_turns, turns.max_user_turns) == (4, 4)
    assert composed.config.actor_rollout_ref.rollout.mode == "async"
    assert len(composed.notices) == 3


def test_old_and_new_spelling_on_one_command_line_must_agree():
    result = rewritten("rollout.n=8", "actor_rollout_ref.rollout.n=4")
    assert [fault.keys for fault in result.faults] == [("rollout.n", "actor_rollout_ref.rollout.n")]
    assert rewritten("rollout.n=8", "actor_rollout_ref.rollout.n=8").faults == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor.lr", "actor_rollout_ref.actor.optim.lr"),
        (
            "actor_rollout_ref.actor.ppo_minibatch_size",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
        ),
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("critic.lr", "critic.optim.lr"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("data.train_file", "data.train_files"),
        ("rolout.top_k", "actor_rollout_ref.rollout.top_k"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(key, meant):
    (fault,) = rewritten(f"{key}=1").faults
    assert fault.text.startswith(f"unknown option {key}; did you mean {meant}")
    assert f"+{key}=" in fault.text


def test_several_candidates_are_all_named():
    (fault,) = rewritten("data.batch_size=1").faults
    assert "data.train_batch_size" in fault.text
    assert "data.val_batch_size" in fault.text


def test_a_key_like_no_other_is_refused_without_a_guess():
    (fault,) = rewritten("zzz=1").faults
    assert fault.text == "unknown option zzz (to add a key of your own, write +zzz=...)"


def test_keys_of_a_users_own_file_are_left_to_hydra():
    result = rewritten("--config-dir=/my", "--config-name=mine", "my.depth=2", "data.seed=1")
    assert result.faults == []
    assert result.arguments[2:] == ["my.depth=2", "++data.seed=1"]
    assert result.doubtful == ["unknown option my.depth"]


def test_a_dry_run_asks_hydra_to_leave_nothing_behind():
    result = rewritten("trainer.dry_run=True", "hydra.run.dir=mine")
    assert "hydra.output_subdir=null" in result.arguments
    assert "hydra.run.dir=." not in result.arguments
    assert "hydra.output_subdir=null" not in rewritten("trainer.dry_run=False").arguments


def test_all_unknown_keys_are_refused_together():
    with pytest.raises(ConfigError, match="2 faults"):
        from_command_line("actor.lr=1", "trainer.epochs=2")


def test_a_mistake_ends_the_command_quickly_without_a_traceback():
    start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    process = run_process("actor.lr=1e-6")
    seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start
    assert process.returncode == 2
    assert process.stdout == ""
    assert "did you mean actor_rollout_ref.actor.optim.lr?" in process.stderr
    assert "Traceback" not in process.stderr
    assert seconds < 6  # of the CPU: about 0.5 s, the rest is room for a busy machine


def test_torch_is_not_imported_before_a_configuration_is_accepted():
    code = (
        "import sys; from verl.trainer.main_ppo import run_ppo; from verl.config.faults import "
        "ConfigError\ntry: run_ppo({'trainer': {'nnodes': 0}})\nexcept ConfigError: pass\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert process.stdout.strip() == "[]", process.stderr


def test_three_faults_are_all_reported(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = run_main(
        monkeypatch,
        "actor_rollout_ref.actor.optim.lr=abc",
        "algorithm.adv_estimator=gpro",
        "data.truncation=lefft",
        "trainer.dry_run=True",
    )
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("error: 3 faults in the configuration:\n1. ")
    assert 'actor_rollout_ref.actor.optim.lr is "abc" (str); it must be a float' in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.train_batch_size=[1,2", "no viable alternative at input '[1,2'"),
        ("--config-name=nope", "Cannot find primary config 'nope'"),
        ("~foo.bar", "Could not delete from config. 'foo.bar' does not exist."),
        ("critic=nope", "Could not find 'critic/nope'"),
    ],
)
def test_hydras_own_complaints_end_in_one_message(monkeypatch, capsys, argument, message):
    assert run_main(monkeypatch, argument) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") or message in said
    assert "Traceback" not in said
    assert "full_key" not in said


def test_cfg_job_shows_todays_keys(monkeypatch, capsys):
    assert run_main(monkeypatch, "--cfg", "job", "reward_model.reward_fn.path=r.py") == 0
    shown = capsys.readouterr()
    assert "custom_reward_function:\n  path: r.py" in shown.out
    assert shown.err == "note: reward_model.reward_fn.path is now custom_reward_function.path\n"


OWN_FILE = """
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

my_rate: 3e-6
data:
  train_batch_size: 64
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 32
    optim:
      lr: ${my_rate}
trainer:
  dry_run: true
"""


def test_a_users_file_composes_on_ours(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN_FILE)
    monkeypatch.chdir(REPOSITORY)
    quiet = ["hydra.run.dir=" + str(tmp_path / "out"), "hydra/job_logging=none"]
    arguments = [f"--config-dir={tmp_path}", "--config-name=mine", "algorithm.adv_estimator=grpo"]
    assert run_main(monkeypatch, *arguments, *quiet) == 0
    shown = capsys.readouterr().out
    assert "3e-06" in shown
    assert "prompts per step                 64" in shown


def test_an_unknown_key_of_a_users_file_is_refused(monkeypatch, capsys, tmp_path):
    text = OWN_FILE.replace("train_batch_size", "train_batchsize")
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.chdir(REPOSITORY)
    quiet = ["hydra.run.dir=" + str(tmp_path / "out"), "hydra/job_logging=none"]
    assert run_main(monkeypatch, f"--config-dir={tmp_path}", "--config-name=mine", *quiet) == 2
    assert "unknown option data.train_batchsize; did you mean" in capsys.readouterr().err


def test_a_misspelled_override_of_a_users_file_gets_our_hint_too(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN_FILE)
    monkeypatch.chdir(REPOSITORY)
    arguments = [f"--config-dir={tmp_path}", "--config-name=mine", "trainer.epochs=2"]
    assert run_main(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert "Could not override 'trainer.epochs'" in said
    assert "did you mean trainer.total_epochs?" in said


def test_several_runs_from_one_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = run_main(
        monkeypatch,
        "--multirun",
        "trainer.dry_run=True",
        "algorithm.adv_estimator=grpo",
        "rollout.n=4,8",
        f"hydra.sweep.dir={tmp_path}/sweep",
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "responses per step               4,096" in shown
    assert "responses per step               8,192" in shown


class Bystander:
    """Stands in for training: keeps what it is given."""

    seen = None

    def run(self, config):
        type(self).seen = config


@pytest.fixture
def startable(tmp_path):
    (tmp_path / "t.json").touch()  # read when training begins
    (tmp_path / "model").mkdir()
    files = {name: str(tmp_path / "t.json") for name in ("train_files", "val_files")}
    return {
        "data": {**files, "seed": 3, "shuffle": False},
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
        "trainer": {"n_gpus_per_node": 1},
    }


def test_a_runner_of_ones_own_gets_the_configuration_as_hydra_would_give_it(startable):
    main_ppo.run_ppo(startable, task_runner_class=Bystander)
    assert isinstance(Bystander.seen, DictConfig)
    assert OmegaConf.select(Bystander.seen, "data.seed") == 3
    assert Bystander.seen.actor_rollout_ref.rollout.name == "native"


def test_a_runner_that_runs_as_ours_does_gets_what_was_loaded(startable, monkeypatch):
    """It would only load it once more."""
    seen = []
    monkeypatch.setattr(main_ppo.TaskRunner, "run", lambda self, config: seen.append(config))
    main_ppo.run_ppo(startable, task_runner_class=type("Own", (main_ppo.TaskRunner,), {}))
    both = type("OwnRun", (Bystander, main_ppo.TaskRunner), {"seen": None})
    main_ppo.run_ppo(startable, task_runner_class=both)
    assert (type(seen[0]), type(both.seen)) == (PPOConfig, DictConfig)


def test_a_refused_configuration_is_not_run():
    with pytest.raises(ConfigError, match=r"trainer\.nnodes is 0"):
        main_ppo.run_ppo({"trainer": {"nnodes": 0}}, task_runner_class=Bystander)


def test_print_cfg_prints_the_resolved_configuration():
    script = Path("scripts") / "print_cfg.py"
    command = [sys.executable, str(script), "data.max_prompt_length=77", "hydra/job_logging=none"]
    command += ["hydra.output_subdir=null", "hydra.run.dir=."]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert process.returncode == 0, process.stderr
    assert "prompt_length: 77" in process.stdout
