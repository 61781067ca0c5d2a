"""Train a reward model on pairs of responses: `python -m verl.trainer.main_rm key=value ...`

Also starts under `torchrun -m`, on as many ranks as it says. `rm_trainer.yaml` holds the options;
`objective.name` chooses between a score for a text (Bradley-Terry) and PRIME's implicit model.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.load import load_config
from verl.config.rm import RMConfig
from verl.trainer.sft.launch import as_started, run, run_command, train_here

CONFIG_NAME = "rm_trainer"
CONFIG_DIR = Path(__file__).parent / "config"


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_rm(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    run_command(as_started(config, RMConfig), RMConfig, train_here)


def run_rm(config: DictConfig | RMConfig) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own."""
    run(load_config(as_started(config, RMConfig), RMConfig, keeps_unknown=True), train_here)


if __name__ == "__main__":
    main()
