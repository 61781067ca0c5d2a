"""Policy-filtered PPO (arXiv:2409.06957) with a replay buffer of graded responses."""
