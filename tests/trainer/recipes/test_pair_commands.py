"""The commands of the recipes start from their files, as scripts call them."""

import sys
from importlib import import_module

import pytest

from verl.config.roles import RECIPES
from verl.trainer import recipes

DRY = ("trainer.dry_run=True", "trainer.device=cpu", "trainer.n_gpus_per_node=1")


def printed(capsys, monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module, *arguments, *DRY])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    import_module(module).main()
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("recipe.online_dpo.main_online_dpo", (), "reference all ranks: a frozen copy"),
        (
            "recipe.spin.main_spin",
            (
                "--config-path=config",
                "--config-name=spin_trainer",
                "actor_rollout_ref.actor.dpo_beta=0.1",
                "trainer.ref_update_freq=1",
                "algorithm.adv_estimator=null",
            ),
            "reference all ranks: a frozen copy",
        ),
        (
            "recipe.sppo.main_sppo",
            ("actor_rollout_ref.actor.sppo_eta=2.0",),
            "responses per prompt 5",
        ),
    ],
)
def test_a_command_has_the_defaults_of_its_recipe(capsys, monkeypatch, module, arguments, said):
    assert said in printed(capsys, monkeypatch, module, *arguments)


def test_what_cannot_be_paired_is_refused_before_anything_is_loaded(capsys, monkeypatch):
    alone = "actor_rollout_ref.rollout.n=1"
    with pytest.raises(SystemExit) as refusal:
        printed(capsys, monkeypatch, "recipe.spin.main_spin", alone)
    assert refusal.value.code == 2
    assert "rollout.n is 1; a pair is two responses to a prompt" in capsys.readouterr().err


def test_the_listed_recipes_are_the_registered_ones():
    assert set(RECIPES) == set(recipes.RECIPES)
    assert all(recipes.RECIPES[name].trainer_class for name in RECIPES)
