"""Commands of asynchronous training: they start from their file, and a dry run shows the plan."""

import sys
from importlib import import_module

import pytest
from omegaconf import OmegaConf

from verl.agent_loop.manager import AgentLoopManager
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.trainer import main_ppo
from verl.trainer.ppo.workers import refuse_what_is_not_here

DRY = ("trainer.dry_run=True", "trainer.device=cpu", "trainer.n_gpus_per_node=1")
ONE_STEP_OFF = "one_step_off_policy.main_ppo"
OLDER_NAME = "one_step_off_policy.async_main_ppo"
FULLY_ASYNC = "fully_async_policy.fully_async_main"


def printed(capsys, monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module, *arguments, *DRY])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    import_module(module).main()
    return " ".join(capsys.readouterr().out.split())


COMMANDS = [
    (f"verl.experimental.{ONE_STEP_OFF}", (), ("age of responses at most 1 step", "side by side")),
    (f"recipe.{OLDER_NAME}", (), ("rows that run then end with the old weights first",)),
    (
        f"verl.experimental.{FULLY_ASYNC}",
        ("rollout.total_rollout_steps=2048",),
        ("B, prompts of a training step 256", "training steps 8", "at most 1,127 prompts, 4,508"),
    ),
    (
        f"recipe.{FULLY_ASYNC}",
        (
            "--config-path=config",
            "--config-name=fully_async_ppo_trainer.yaml",
            "rollout.total_rollout_steps=2048",
            "async_training.staleness_threshold=0",
            "async_training.trigger_parameter_sync_step=1",
        ),
        ("at most 0 steps: ceil((1 + s) M) - 1 (on-policy)",),
    ),
    (
        f"verl.experimental.{ONE_STEP_OFF}",
        (
            "--config-name=ppo_trainer",
            "actor_rollout_ref.rollout.name=native_process",
            "actor_rollout_ref.rollout.free_cache_engine=False",
            "algorithm.rollout_correction.rollout_is=token",
        ),
        ("async_training.mode=one_step_off", "s, share generated ahead 1: 1,024 prompts"),
    ),
    (
        "verl.trainer.main_ppo",
        (
            "trainer.v1.trainer_mode=colocate_async",
            "algorithm.rollout_correction.bypass_mode=True",
        ),
        ("generation pauses meanwhile", "go on with the new weights"),
    ),
]


@pytest.mark.parametrize(("module", "arguments", "lines"), COMMANDS)
def test_a_dry_run_shows_the_plan(module, arguments, lines, capsys, monkeypatch):
    shown = printed(capsys, monkeypatch, module, *arguments)
    assert "Asynchronous schedule" in shown
    for line in lines:
        assert line in shown


def test_a_synchronous_run_shows_none(capsys, monkeypatch):
    assert "Asynchronous" not in printed(capsys, monkeypatch, "verl.trainer.main_ppo")


def test_a_program_may_pass_its_configuration(capsys):
    """The command's option holds whatever the file says; the caller's object stays as it was."""
    config = OmegaConf.create(
        {
            "trainer": {"dry_run": True, "device": "cpu", "n_gpus_per_node": 1},
            "actor_rollout_ref": {"hybrid_engine": False},
            "algorithm": {"rollout_correction": {"bypass_mode": True}},
            "rollout": {"nnodes": 1, "n_gpus_per_node": 1, "free_cache_engine": False},
        }
    )
    OmegaConf.set_struct(config, True)
    main_ppo.ONE_STEP_OFF.main(config)
    assert "Asynchronous schedule" in capsys.readouterr().out
    assert "async_training" not in config


class WholeBatches(AgentLoopManager):
    def generate_sequences(self, prompts):
        return prompts


class RowByRow(AgentLoopManager):
    pass


@pytest.mark.parametrize("manager", [WholeBatches, RowByRow])
def test_a_manager_of_whole_batches_is_refused(manager):
    name = f"{manager.__module__}.{manager.__name__}"

    def config(mode):
        agent = {"agent_loop_manager_class": name}
        values = {"async_training": {"mode": mode}, "rollout": {"agent": agent}}
        return load_config(values, PPOConfig).config

    refuse_what_is_not_here(config("sync"))
    if manager is RowByRow:
        refuse_what_is_not_here(config("one_step_off"))
    else:
        with pytest.raises(ValueError, match=r"WholeBatches.*generate_sequences of its own"):
            refuse_what_is_not_here(config("one_step_off"))
