"""A command line, composed and loaded in this process, as the commands do it.

Composing reads thirty files each time. Arguments that set keys of sections choose no file, so those
are applied to what the files gave the first time.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from verl.config.command import rewrite
from verl.config.faults import ConfigError
from verl.config.load import Loaded, load_config
from verl.config.schema import FILE_ROOTS

CONFIG_DIR = Path(__file__).parents[2] / "verl" / "trainer" / "config"
SETS_A_KEY = re.compile(r"\+{0,2}\w+\.[\w.]+=")


@dataclass(frozen=True)
class Composed:
    loaded: Loaded
    notices: list[str]

    @property
    def config(self):
        return self.loaded.checked()


@cache
def of_files(config_name: str) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose(config_name)


def composed_of(config_name: str, arguments: Sequence[str]) -> DictConfig:
    if all(map(SETS_A_KEY.match, arguments)):
        config = deepcopy(of_files(config_name))
        overrides = OverridesParser.create().parse_overrides([*arguments])
        ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
        return config
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose(config_name, overrides=[*arguments])


def from_command_line(*arguments: str, config_name: str = "ppo_trainer") -> Composed:
    rewritten = rewrite(list(arguments), config_name, CONFIG_DIR)
    if rewritten.faults:
        raise ConfigError(rewritten.faults)
    composed = composed_of(config_name, rewritten.arguments)
    loaded = load_config(composed, FILE_ROOTS[config_name], overrides=rewritten.arguments)
    renames = [f"{old} is now {new}" for old, new in rewritten.renames.items()]
    return Composed(loaded, renames + loaded.notices)
