"""verl: reinforcement-learning post-training of language models, from one CPU process to a cluster.

Importing this package is cheap: `DataProto` (and torch with it) is loaded on first use, so that
reading a configuration or printing a help text does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

from verl.utils.environment import external_modules, set_up_logging
from verl.utils.import_utils import import_external_libs, lazy_attribute
from verl.utils.old_paths import install as install_old_paths

if TYPE_CHECKING:
    from verl.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]

_LAZY = {"DataProto": "verl.protocol:DataProto"}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _LAZY, name)


install_old_paths()
set_up_logging()
import_external_libs(external_modules())
