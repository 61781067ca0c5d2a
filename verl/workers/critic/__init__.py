"""The value function's side of a training step."""
