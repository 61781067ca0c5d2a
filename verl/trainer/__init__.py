"""Programs that train: the PPO family in `ppo`, supervised fine-tuning in `sft`."""

from verl.utils.environment import require_address_space

require_address_space()  # before anything loads a library that waits for memory
