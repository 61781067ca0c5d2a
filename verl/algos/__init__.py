"""The mathematics of reinforcement learning: tensors in, tensors out, no models and no workers.

Importing it registers the built-in advantage estimators and policy losses, so that a name in a
configuration is found whichever module of this package was asked for first.
"""

from verl.algos import advantages, policy_losses

__all__ = ["advantages", "policy_losses"]
