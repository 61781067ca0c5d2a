"""Answer a file of prompts: `python -m verl.trainer.main_generation data.path=... key=value ...`

The output is the input with a column `responses`, a list of `data.n_samples` texts per row; the
rows keep their order. A run that was stopped goes on where it was when the same command is given
again.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.effects import idle_notices
from verl.config.faults import ConfigError, Fault
from verl.config.generation import GenerationConfig
from verl.config.load import Loaded, load_config
from verl.config.validate import validate
from verl.trainer.generation.plan import Start, generation_faults, plan_lines
from verl.utils.environment import choose_openmp
from verl.utils.import_utils import lazy_attribute

CONFIG_NAME = "generation"
CONFIG_DIR = Path(__file__).parent / "config"

# What loads torch is imported when generation starts, not when a mistake is reported.
_LAZY = {
    "generate": "verl.trainer.generation.run:generate",
    "start_engines": "verl.trainer.generation.engines:start_engines",
}


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run(load_config(config, GenerationConfig, keeps_unknown=True))
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    command.load_and_run(config, GenerationConfig, run)


def run(loaded: Loaded) -> None:
    """Say what was translated, refuse what is wrong, then print the plan or generate."""
    command.say(loaded.notices)
    config: GenerationConfig = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    faults += generation_faults(config)
    mistakes = [fault for fault in faults if not fault.is_about_machine]
    if config.trainer.dry_run:
        if mistakes:
            raise ConfigError(mistakes)
        command.say(idle_notices(config, loaded.user_set))
        say_plan(config, faults)
    elif faults:
        raise ConfigError(faults)
    else:
        command.say([*idle_notices(config, loaded.user_set), *choose_openmp()])
        generate_and_report(loaded)


def say_plan(config: GenerationConfig, missing: list[Fault]) -> None:
    write_lines(list(plan_lines(config)))
    write_lines([f"missing on this machine: {fault.text}" for fault in missing])


def generate_and_report(loaded: Loaded) -> None:
    config: GenerationConfig = loaded.config
    dtype = config.rollout.dtype if "rollout.dtype" in loaded.user_set else "auto"

    def start(model_path: str, num_batches: int) -> Any:
        start_engines = lazy_attribute(__name__, _LAZY, "start_engines")
        return start_engines(config, model_path, num_batches=num_batches, dtype=dtype)

    def announce(start: Start) -> None:
        write_lines(list(start.lines(config)))

    summary = lazy_attribute(__name__, _LAZY, "generate")(config, start, announce)
    write_lines(list(summary.lines()))


def write_lines(lines: list[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
