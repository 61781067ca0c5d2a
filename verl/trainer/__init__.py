"""Programs that train: the PPO family in `ppo`, supervised fine-tuning in `sft`."""
