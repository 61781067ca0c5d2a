"""Serve a model: `python -m verl.trainer.main_generation_server actor_rollout_ref.model.path=...`

The model is served under OpenAI's HTTP API until the program is told to end (Ctrl-C or SIGTERM).
With `data.output_path=...` the prompts of `data.train_files` are sent to the server instead, and
the program ends when the file with their responses is written.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.faults import ConfigError, Fault
from verl.config.load import Loaded, load_config
from verl.config.ppo import PPOConfig
from verl.trainer.serving.checks import serving_faults, serving_notices
from verl.utils.environment import choose_openmp
from verl.utils.import_utils import lazy_attribute, require

CONFIG_NAME = "ppo_trainer"
CONFIG_DIR = Path(__file__).parent / "config"

# What loads torch is imported when engines start, not when a mistake is reported.
_LAZY = {"serve_model": "verl.trainer.serving.run:serve_model"}


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run(load_config(config, PPOConfig, keeps_unknown=True))
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    command.load_and_run(config, PPOConfig, run)


def run(loaded: Loaded) -> None:
    """Say what was translated, refuse what is wrong, then print the plan or serve."""
    command.say(loaded.notices)
    config: PPOConfig = loaded.config
    faults = [*loaded.faults, *serving_faults(config, loaded.user_set)]
    missing = [fault for fault in faults if fault.is_about_machine]
    mistakes = [fault for fault in faults if not fault.is_about_machine]
    if mistakes or (missing and not config.trainer.dry_run):
        raise ConfigError(mistakes or missing)
    if config.trainer.dry_run:
        command.say(serving_notices(config, loaded.user_set))
        sys.stdout.writelines(f"{line}\n" for line in plan_lines(config, missing))
        return
    require("fastapi", extra="server")
    command.say([*serving_notices(config, loaded.user_set), *choose_openmp()])
    dtype = "actor_rollout_ref.rollout.dtype"
    has_dtype = dtype in loaded.user_set
    lazy_attribute(__name__, _LAZY, "serve_model")(config, is_dtype_chosen=has_dtype)


def plan_lines(config: PPOConfig, missing: list[Fault]) -> Iterator[str]:
    """What would be served, by which engines and to whom."""
    rollout, devices = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    size = rollout.tensor_model_parallel_size
    yield f"plan: serve {config.actor_rollout_ref.model.path}"
    yield f"  engines  {devices // size} x {rollout.name} on {size} of {devices} devices"
    if config.data.output_path is not None:
        yield f"  answers  {config.data.train_files} -> {config.data.output_path}"
    yield from (f"missing on this machine: {fault.text}" for fault in missing)


if __name__ == "__main__":
    main()
