"""Fully asynchronous training: prompts stream through generation while steps are trained."""
