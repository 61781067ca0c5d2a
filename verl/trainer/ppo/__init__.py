"""The training loop of the PPO family and its stages."""
