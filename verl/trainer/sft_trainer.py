"""Fine-tune on conversations: `torchrun --nproc_per_node 2 -m verl.trainer.sft_trainer key=value`

Plain `python -m` runs one rank. `sft_trainer_engine.yaml` holds the options; the loop is that of
`fsdp_sft_trainer`.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.load import load_config
from verl.config.sft import SFTEngineConfig
from verl.trainer.sft.launch import as_started, run, run_command, train_here

CONFIG_NAME = "sft_trainer_engine"
CONFIG_DIR = Path(__file__).parent / "config"


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_sft(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    run_command(as_started(config, SFTEngineConfig), SFTEngineConfig, train_here)


def run_sft(config: DictConfig | SFTEngineConfig) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own."""
    run(
        load_config(as_started(config, SFTEngineConfig), SFTEngineConfig, keeps_unknown=True),
        train_here,
    )


if __name__ == "__main__":
    main()
