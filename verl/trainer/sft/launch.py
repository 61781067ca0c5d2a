"""What the three SFT commands share: refuse what is wrong, print the plan, train, report.

A run is one process, or one of several that `torchrun` started and that meet in a process group;
`sft_trainer_ray` brings its own way to train. What loads torch is imported when training starts,
not when a mistake is reported. Only rank 0 speaks.
"""

import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config import command
from verl.config.convert import to_dict
from verl.config.effects import idle_notices
from verl.config.faults import ConfigError
from verl.config.load import Loaded, load_config
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.config.validate import validate
from verl.trainer.sft.plan import plan
from verl.trainer.sft.refusals import unsupported
from verl.utils.environment import EndsTheRun, rank, world_size
from verl.utils.import_utils import lazy_attribute

AnySFTConfig = SFTConfig | SFTEngineConfig
Train = Callable[[Loaded], None]

SILENT_RANK_SECONDS = 1800.0
"""How long ranks wait for one that neither works nor dies, for example while it writes."""

_LAZY = {
    "SFTTrainer": "verl.trainer.sft.trainer:SFTTrainer",
    "join": "verl.utils.distributed:initialize_global_process_group",
    "leave": "verl.utils.distributed:destroy_global_process_group",
}


def run_command(config: DictConfig, root: type[AnySFTConfig], train: Train) -> None:
    """What Hydra composed from a command line; a mistake ends the process without a traceback."""
    try:
        run(load_config(config, root, overrides=command.task_overrides()), train)
    except ConfigError as error:
        refuse(str(error))
    except EndsTheRun as error:
        refuse(str(error), error.exit_code)


def run(loaded: Loaded, train: Train) -> None:
    """Say what was translated, refuse what is wrong, then print the plan or train."""
    say(loaded.notices)
    config: AnySFTConfig = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    faults += unsupported(config)
    if config.trainer.dry_run:
        faults = [fault for fault in faults if not fault.is_about_machine]
    if faults:
        raise ConfigError(faults)
    if config.trainer.dry_run:
        sys.stdout.write(f"{plan(config)}\n")
        return
    say(idle_notices(config, loaded.user_set))
    train(loaded)


def train_here(loaded: Loaded) -> None:
    """Train in this process, as one of the ranks that `torchrun` started if it did."""
    config = loaded.config
    has_peers = world_size() > 1
    if has_peers:
        say([replication_notice(world_size())])
        lazy_attribute(__name__, _LAZY, "join")(timeout_second=SILENT_RANK_SECONDS)
    trainer = lazy_attribute(__name__, _LAZY, "SFTTrainer")(config)
    trainer.fit()
    if has_peers:
        lazy_attribute(__name__, _LAZY, "leave")()
    if rank() == 0:
        sys.stdout.write(f"{ending(trainer)}\n")


def ending(trainer: Any) -> str:
    """The last lines of a run."""
    weights = trainer.checkpoints.weights(trainer.summary.last_step)
    where = f"\nthe model is in {weights}" if weights.exists() else ""
    return f"{trainer.summary.text}{where}"


def replication_notice(num_ranks: int) -> str:
    return (
        f"each of the {num_ranks} ranks holds the whole model and a share of the rows; weights are "
        "not sharded (fsdp and fsdp2 mean the same here)"
    )


def as_started(config: DictConfig | AnySFTConfig, root: type[AnySFTConfig]) -> DictConfig:
    """How many processes there are is decided by whoever started them, not by the configuration."""
    started = {"nnodes": 1, "n_gpus_per_node": world_size()}
    asked = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if asked not in (world_size(), root().trainer.n_gpus_per_node):
        say([f"the configuration says {asked} devices; this run was started on {world_size()}"])
    is_typed = isinstance(config, SFTConfig | SFTEngineConfig)
    merged = OmegaConf.merge(to_dict(config) if is_typed else config, {"trainer": started})
    assert isinstance(merged, DictConfig)
    return merged


def say(notices: list[str]) -> None:
    if rank() == 0:
        command.say(notices)


def refuse(message: str, exit_code: int = command.MISTAKE) -> None:
    """End every rank; one of them says why."""
    if rank() == 0:
        command.refuse(message, exit_code)
    raise SystemExit(exit_code)
