"""The policy's side of a training step."""
