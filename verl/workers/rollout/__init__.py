"""Rollout engines: the built-in one, and adapters for others."""
