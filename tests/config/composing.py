"""A command line, composed and loaded in this process, as the commands do it."""

from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir

from verl.config.command import rewrite
from verl.config.faults import ConfigError
from verl.config.load import Loaded, load_config
from verl.config.schema import FILE_ROOTS

CONFIG_DIR = Path(__file__).parents[2] / "verl" / "trainer" / "config"


@dataclass(frozen=True)
class Composed:
    loaded: Loaded
    notices: list[str]

    @property
    def config(self):
        return self.loaded.checked()


def from_command_line(*arguments: str, config_name: str = "ppo_trainer") -> Composed:
    rewritten = rewrite(list(arguments), config_name, CONFIG_DIR)
    if rewritten.faults:
        raise ConfigError(rewritten.faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        composed = compose(config_name, overrides=rewritten.arguments)
    loaded = load_config(composed, FILE_ROOTS[config_name], overrides=rewritten.arguments)
    renames = [f"{old} is now {new}" for old, new in rewritten.renames.items()]
    return Composed(loaded, renames + loaded.notices)
