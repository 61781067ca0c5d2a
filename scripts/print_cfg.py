"""Print the configuration that Hydra composes: `python scripts/print_cfg.py key=value ...`

Old keys are translated and unknown ones refused, exactly as `verl.trainer.main_ppo` does.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from verl.config import command
from verl.config.convert import to_dictconfig
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.ppo import PPOConfig

CONFIG_DIR = Path(__file__).parents[1] / "verl" / "trainer" / "config"


@hydra.main(config_path=str(CONFIG_DIR), config_name="ppo_trainer", version_base=None)
def print_config(config: DictConfig) -> None:
    try:
        loaded = load_config(config, PPOConfig, overrides=command.task_overrides())
        command.say(loaded.notices)
        print(OmegaConf.to_yaml(to_dictconfig(loaded.checked())))
    except ConfigError as error:
        command.refuse(str(error))


if __name__ == "__main__":
    command.run(print_config, "ppo_trainer", CONFIG_DIR)
