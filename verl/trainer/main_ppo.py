"""Train a policy: `python -m verl.trainer.main_ppo key=value ...`

The command line goes through `verl.config.command` to Hydra, the composed configuration through
`load_config` and `validate`; what is wrong is said before anything heavy is loaded. Then the plan
is printed (`trainer.dry_run=True`) or the run starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from verl.config import command
from verl.config.convert import to_dictconfig
from verl.config.effects import idle_notices
from verl.config.faults import ConfigError
from verl.config.load import Loaded, load_config
from verl.config.ppo import PPOConfig
from verl.config.validate import advice, validate
from verl.trainer.plan.layout import controller, row_faults
from verl.trainer.plan.megatron import layout_faults
from verl.trainer.plan.model import model_faults
from verl.trainer.plan.render import make_plan, print_plan
from verl.trainer.plan.shape import length_notices
from verl.utils.environment import choose_openmp
from verl.utils.import_utils import lazy_attribute

CONFIG_NAME = "ppo_trainer"
CONFIG_DIR = Path(__file__).parent / "config"


@dataclass(frozen=True)
class Command:
    """A command that is `main_ppo` with a file of defaults, and perhaps an option of its own."""

    config_name: str
    key: str | None = None
    value: Any = None

    @classmethod
    def of_recipe(cls, name: str) -> "Command":
        """The command of a recipe that has stages of its own."""
        return cls(f"{name}_trainer", "trainer.recipe", name)

    def main(self, config: DictConfig | None = None) -> None:
        """Run it: with its file unless the command line names one, or with a configuration."""
        if config is None:
            options = [] if self.key is None else [f"{self.key}={self.value}"]
            command.run(from_hydra, self.config_name, CONFIG_DIR, options=options)
            return
        config = config.copy()
        if self.key is not None:
            OmegaConf.update(config, self.key, self.value, force_add=True)
        run_ppo(config)


ONE_STEP_OFF = Command("one_step_off_ppo_trainer", "async_training.mode", "one_step_off")
FULLY_ASYNC = Command("fully_async_ppo_trainer", "async_training.mode", "fully_async")
TRANSFER_QUEUE = Command("transfer_queue_ppo_trainer", "transfer_queue.enable", True)

# What loads torch is imported when a run starts, not when a mistake is reported.
_LAZY = {
    "runner_of": "verl.trainer.recipes:runner_of",
    "TaskRunner": "verl.trainer.task_runner:TaskRunner",
    "TaskRunnerV1": "verl.trainer.task_runner:TaskRunner",
    "run_on_ray": "verl.trainer.on_ray:run_on_ray",
    "create_rl_dataset": "verl.trainer.ppo.data:create_rl_dataset",
    "create_rl_sampler": "verl.trainer.ppo.data:create_rl_sampler",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_ppo(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    command.load_and_run(config, PPOConfig, run)


def run_ppo(config: DictConfig | PPOConfig, task_runner_class: type[Any] | None = None) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own.

    Keys that verl does not know are kept for them, and they may have registered names of theirs.
    """
    run(load_config(config, PPOConfig, keeps_unknown=True), task_runner_class, names_are_open=True)


def run(
    loaded: Loaded, task_runner_class: type[Any] | None = None, *, names_are_open: bool = False
) -> None:
    """Say what was translated, refuse what is wrong, then print the plan or train."""
    command.say(loaded.notices)
    config = loaded.config
    faults = validate(
        config, loaded.user_set, known_faults=loaded.faults, names_are_open=names_are_open
    )
    faults += [*row_faults(config), *layout_faults(config), *model_faults(config)]
    missing = [fault for fault in faults if fault.is_about_machine]
    mistakes = [fault for fault in faults if not fault.is_about_machine]
    if config.trainer.dry_run:
        if mistakes:
            raise ConfigError(mistakes)
        print_plan(make_plan(loaded, missing))
    elif faults:
        raise ConfigError(faults)
    else:
        idle = idle_notices(config, loaded.user_set)
        command.say([*advice(config), *length_notices(config), *idle, *choose_openmp()])
        train(loaded, task_runner_class)


def train(loaded: Loaded, task_runner_class: type[Any] | None) -> None:
    """Run on the controller that the configuration asks for.

    A runner with a `run` of its own gets the configuration in the form that Hydra would have given
    it. On Ray, and if its class is an actor class, it runs as an actor.
    """
    config = loaded.config
    is_actor_class = task_runner_class is not None and not isinstance(task_runner_class, type)
    if is_actor_class or controller(config) == "ray":
        run_on_ray = lazy_attribute(__name__, _LAZY, "run_on_ray")
        run_on_ray(config, task_runner_class)
    elif task_runner_class is not None:
        usual = lazy_attribute(__name__, _LAZY, "TaskRunner")
        is_usual = issubclass(task_runner_class, usual) and task_runner_class.run is usual.run
        task_runner_class().run(config if is_usual else to_dictconfig(config))
    else:
        lazy_attribute(__name__, _LAZY, "runner_of")(config)().run(config)


if __name__ == "__main__":
    main()
