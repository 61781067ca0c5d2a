"""PRIME (arXiv:2502.01456): an implicit process reward model, trained online beside the policy."""
