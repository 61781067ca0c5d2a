"""Supervised fine-tuning: a model learns to continue prompts the way the data does."""
