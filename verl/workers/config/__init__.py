"""The workers' sections, under the names that `_target_` and users' code use.

They live in `verl.config`; nothing in the package imports them from here.
"""

from typing import Any

from verl.utils.import_utils import lazy_attribute
from verl.workers.config.actor import *  # noqa: F403
from verl.workers.config.critic import *  # noqa: F403
from verl.workers.config.engine import *  # noqa: F403
from verl.workers.config.model import *  # noqa: F403
from verl.workers.config.optimizer import *  # noqa: F403
from verl.workers.config.optimizer import LAZY
from verl.workers.config.reward_model import *  # noqa: F403
from verl.workers.config.rollout import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, LAZY, name)
