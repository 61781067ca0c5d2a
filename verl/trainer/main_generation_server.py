"""Serve a model: `python -m verl.trainer.main_generation_server actor_rollout_ref.model.path=...`

The model is served under OpenAI's HTTP API until the program is told to end (Ctrl-C or SIGTERM).
With `data.output_path=...` the prompts of `data.train_files` are sent to the server instead, and
the program ends when the file with their responses is written.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.effects import absent_faults, changed, is_at_or_below
from verl.config.faults import ConfigError, Fault
from verl.config.generation import READ_BY_ENGINES
from verl.config.load import Loaded, load_config
from verl.config.packages import engine_package_faults
from verl.config.ppo import PPOConfig
from verl.config.validate_machine import model_faults
from verl.utils.environment import choose_openmp
from verl.utils.import_utils import lazy_attribute, require

ROLLOUT = "actor_rollout_ref.rollout"

READS = (
    *(f"{ROLLOUT}.{name}" for name in READ_BY_ENGINES),
    f"{ROLLOUT}.multi_turn.format",
    *(f"actor_rollout_ref.model.{name}" for name in ("path", "use_shm")),
    *(f"actor_rollout_ref.model.{name}" for name in ("external_lib", "trust_remote_code")),
    *(f"data.{name}" for name in ("output_path", "chat_template", "apply_chat_template_kwargs")),
    *(f"data.{name}" for name in ("max_prompt_length", "max_response_length")),
    *(f"trainer.{name}" for name in ("nnodes", "n_gpus_per_node", "device", "dry_run")),
)
"""What a server reads of the configuration."""

READS_OF_ROWS = (
    f"{ROLLOUT}.n",
    *(f"data.{name}" for name in ("train_files", "prompt_key", "truncation", "seed", "cache_dir")),
)
"""What it reads besides to answer the rows of a file."""

CONFIG_NAME = "ppo_trainer"
CONFIG_DIR = Path(__file__).parent / "config"

# What loads torch is imported when engines start, not when a mistake is reported.
_LAZY = {"serve_model": "verl.trainer.serving:serve_model"}


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


def serving_notices(config: PPOConfig, user_set: Iterable[str]) -> list[str]:
    """A line for each of the user's settings that a server does not read."""
    reads = READS if config.data.output_path is None else READS + READS_OF_ROWS
    ignored = [
        key
        for key in sorted(changed(config, user_set))
        if not any(is_at_or_below(key, name) for name in reads)
    ]
    return [f"{key} has no effect here: a server does not read it" for key in ignored]


def serving_faults(config: PPOConfig, user_set: Iterable[str] = ()) -> Iterator[Fault]:
    yield from absent_faults(config, user_set)
    yield from model_faults("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    yield from engine_package_faults(config)
    yield from place_faults(config)
    if config.data.output_path is not None:
        yield from output_faults(config, config.data.output_path)


def place_faults(config: PPOConfig) -> Iterator[Fault]:
    trainer = config.trainer
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if trainer.nnodes > 1:
        text = (
            f"trainer.nnodes is {trainer.nnodes}; a server has the devices of one machine: start "
            "one on each machine"
        )
        yield Fault(text, ("trainer.nnodes",))
    if trainer.n_gpus_per_node % size:
        text = (
            f"{ROLLOUT}.tensor_model_parallel_size is {size}; it must divide "
            f"trainer.n_gpus_per_node ({trainer.n_gpus_per_node}), so that every device has a place"
        )
        keys = (f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node")
        yield Fault(text, keys)


def output_faults(config: PPOConfig, shown: str) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        text = (
            f"{ROLLOUT}.n is {rollout.n}, but nothing is drawn at random: all {rollout.n} "
            f"responses to a prompt would be equal; set {ROLLOUT}.n=1, or a temperature above 0"
        )
        yield Fault(text, (f"{ROLLOUT}.n", f"{ROLLOUT}.temperature"))
    if "://" in shown or Path(shown).expanduser().is_dir():
        text = f"data.output_path is {shown}; it must be a local file"
        yield Fault(text, ("data.output_path",))
    files = config.data.train_files
    for name in [files] if isinstance(files, str) else files:
        if not name.endswith(".parquet"):
            text = f"data.train_files has {name}; prompts are read from .parquet files"
            yield Fault(text, ("data.train_files",))


if __name__ == "__main__":
    main()
