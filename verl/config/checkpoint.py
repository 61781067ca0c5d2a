"""What a checkpoint holds and what is taken back from it."""

from dataclasses import dataclass

from verl.config.base import BaseConfig, option

CONTENTS = ["model", "optimizer", "extra"]
CHOICES = (*CONTENTS, "hf_model")


@dataclass(kw_only=True)
class CheckpointConfig(BaseConfig):
    """Contents of one role's checkpoint. Where and how often is in `trainer`."""

    _target_: str = "verl.trainer.config.CheckpointConfig"

    save_contents: list[str] = option(default_factory=CONTENTS.copy, choices=CHOICES)
    """Any of `model`, `optimizer`, `extra` (schedule and random state) and `hf_model` (a folder
    that `from_pretrained` loads)."""

    load_contents: list[str] = option(
        default_factory=CONTENTS.copy, yaml="${.save_contents}", choices=CHOICES
    )
    """What a resumed run restores, from the same list."""

    async_save: bool = False
    """Copy the state to host memory and write it in the background while training goes on."""
