"""Supervised fine-tuning: a model learns to continue prompts the way the data does."""

import logging

from verl.utils.environment import sft_logging_level

logging.getLogger(__name__).setLevel(sft_logging_level())
