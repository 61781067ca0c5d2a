"""What a configuration of `main_generation_server` must obey; nothing heavy is imported."""

from collections.abc import Iterator
from pathlib import Path

from verl.config.faults import Fault
from verl.config.ppo import PPOConfig
from verl.config.validate_machine import engine_package_faults, model_faults

ROLLOUT = "actor_rollout_ref.rollout"


def serving_faults(config: PPOConfig) -> Iterator[Fault]:
    yield from model_faults("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    yield from engine_package_faults(config)
    yield from place_faults(config)
    if config.data.output_path is not None:
        yield from output_faults(config, config.data.output_path)


def place_faults(config: PPOConfig) -> Iterator[Fault]:
    trainer = config.trainer
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if trainer.nnodes > 1:
        text = (
            f"trainer.nnodes is {trainer.nnodes}; a server has the devices of one machine: start "
            "one on each machine"
        )
        yield Fault(text, ("trainer.nnodes",))
    if trainer.n_gpus_per_node % size:
        text = (
            f"{ROLLOUT}.tensor_model_parallel_size is {size}; it must divide "
            f"trainer.n_gpus_per_node ({trainer.n_gpus_per_node}), so that every device has a place"
        )
        keys = (f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node")
        yield Fault(text, keys)


def output_faults(config: PPOConfig, shown: str) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        text = (
            f"{ROLLOUT}.n is {rollout.n}, but nothing is drawn at random: all {rollout.n} "
            f"responses to a prompt would be equal; set {ROLLOUT}.n=1, or a temperature above 0"
        )
        yield Fault(text, (f"{ROLLOUT}.n", f"{ROLLOUT}.temperature"))
    if "://" in shown or Path(shown).expanduser().is_dir():
        text = f"data.output_path is {shown}; it must be a local file"
        yield Fault(text, ("data.output_path",))
    files = config.data.train_files
    for name in [files] if isinstance(files, str) else files:
        if not name.endswith(".parquet"):
            text = f"data.train_files has {name}; prompts are read from .parquet files"
            yield Fault(text, ("data.train_files",))
