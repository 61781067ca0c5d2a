"""Engines in processes of their own, possibly in another Python environment."""
