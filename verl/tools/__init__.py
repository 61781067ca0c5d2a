"""Tools that a model may call during a rollout: what they are, and how a trajectory holds them."""
