"""The configuration functions that users' programs import: `from verl.utils.config import ...`"""

from verl.config.convert import omega_conf_to_dataclass, update_dict_with_config
from verl.config.validate import validate_config

__all__ = ["omega_conf_to_dataclass", "update_dict_with_config", "validate_config"]
