"""Commands that users have reach the plan, or are refused with the part that is missing."""

import re
import shlex
import sys

import pytest

from tests.compat.commands import ACCEPTED, REFUSED
from verl.trainer import (
    fsdp_sft_trainer,
    main_eval,
    main_generation,
    main_generation_server,
    main_ppo,
    sft_trainer,
)

MAINS = {
    "main_ppo": main_ppo.main,
    "recipe.dapo.main_dapo": main_ppo.main,
    "experimental.one_step_off_policy.main_ppo": main_ppo.ONE_STEP_OFF.main,
    "experimental.fully_async_policy.fully_async_main": main_ppo.FULLY_ASYNC.main,
    "fsdp_sft_trainer": fsdp_sft_trainer.main,
    "sft_trainer": sft_trainer.main,
    "main_generation": main_generation.main,
    "main_generation_server": main_generation_server.main,
    "main_eval": main_eval.main,
}


def start(command, monkeypatch, tmp_path):
    """Run a command for its plan, in a folder without the files that it names."""
    module, *arguments = shlex.split(command.replace("$HOME", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", [module, *last_wins(arguments), "trainer.dry_run=True"])
    MAINS[module]()


def last_wins(arguments):
    """A table composes commands, and Hydra refuses a key that is there twice."""
    by_key = {}
    for argument in arguments:
        key = re.sub(r"^\++", "", argument.partition("=")[0])
        by_key.pop(key, None)
        by_key[key] = argument
    return list(by_key.values())


USUAL = (
    "PPO with a critic",
    "GRPO of 0.9",
    "GRPO on Megatron",
    "GRPO with values that an unset variable leaves",
    "DAPO",
    "multi-turn of an older script",
    "fully asynchronous",
    "SFT with sequence parallelism",
    "SFT with an engine",
    "generation on two nodes",
    "generation by a server",
    "evaluation",
)
"""One of each kind; `-m slow` has the others."""


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in ACCEPTED],
)
def test_a_command_reaches_the_plan(name, monkeypatch, tmp_path, capsys):
    start(ACCEPTED[name], monkeypatch, tmp_path)
    said = capsys.readouterr()
    assert said.out.strip(), said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_part_is_named(name, monkeypatch, tmp_path, capsys):
    command, part = REFUSED[name]
    with pytest.raises(SystemExit) as end:
        start(command, monkeypatch, tmp_path)
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert part in said
    assert "Traceback" not in said
