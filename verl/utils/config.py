"""The configuration functions that users' programs import: `from verl.utils.config import ...`"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl.config.convert import omega_conf_to_dataclass
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.names import Roles
from verl.config.ppo import PPOConfig
from verl.config.validate import validate

__all__ = ["omega_conf_to_dataclass", "update_dict_with_config", "validate_config"]


def validate_config(
    config: DictConfig | PPOConfig, use_reference_policy: bool, use_critic: bool
) -> None:
    """Raise a ValueError that lists every contradiction of an RL configuration.

    Whether files and packages are on this machine is not looked at here.
    """
    loaded = load_config(config, PPOConfig, keeps_unknown=True)
    roles = Roles(has_critic=use_critic, has_reference=use_reference_policy)
    faults = validate(
        loaded.config,
        loaded.user_set,
        known_faults=loaded.faults,
        names_are_open=True,
        roles=roles,
    )
    mistakes = [fault for fault in faults if not fault.is_about_machine]
    if mistakes:
        raise ConfigError(mistakes)


def update_dict_with_config(dictionary: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Replace the values of `dictionary` by those that `config` has under the same keys."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]
