"""Fine-tune on prompts and responses: `python -m verl.trainer.fsdp_sft_trainer key=value ...`

Also starts under `torchrun -m`, on as many ranks as it says. `sft_trainer.yaml` holds the options;
with `data.multiturn.enable=True` rows are conversations.
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.load import load_config
from verl.config.sft import SFTConfig
from verl.trainer.sft.launch import as_started, run, run_command, train_here
from verl.utils.import_utils import lazy_attribute

CONFIG_NAME = "sft_trainer"
CONFIG_DIR = Path(__file__).parent / "config"
_LAZY = {
    "FSDPSFTTrainer": "verl.trainer.sft.trainer:SFTTrainer",
    "create_sft_dataset": "verl.trainer.sft.settings:create_sft_dataset",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_sft(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    run_command(as_started(config, SFTConfig), SFTConfig, train_here)


def run_sft(config: DictConfig | SFTConfig) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own."""
    run(load_config(as_started(config, SFTConfig), SFTConfig, keeps_unknown=True), train_here)


if __name__ == "__main__":
    main()
