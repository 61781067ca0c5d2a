"""What a configuration of `main_generation` must obey beyond the rules of single options.

Nothing heavy is imported: mistakes are reported before torch is.
"""

from collections.abc import Iterator
from pathlib import Path

from verl.config.faults import Fault
from verl.config.generation import GenerationConfig


def generation_faults(config: GenerationConfig) -> Iterator[Fault]:
    yield from sampling_faults(config)
    yield from place_faults(config)
    yield from output_faults(config)


def sampling_faults(config: GenerationConfig) -> Iterator[Fault]:
    samples = config.data.n_samples
    if is_greedy(config) and samples > 1:
        key = "rollout.temperature is 0" if config.rollout.do_sample else "rollout.do_sample is off"
        text = (
            f"data.n_samples is {samples}, but {key}: all {samples} responses to a prompt would be "
            "equal; set data.n_samples=1, or sample at a temperature above 0"
        )
        yield Fault(text, ("data.n_samples", "rollout.temperature"))


def place_faults(config: GenerationConfig) -> Iterator[Fault]:
    trainer, tensor_parallel = config.trainer, config.rollout.tensor_model_parallel_size
    if trainer.nnodes > 1:
        text = (
            f"trainer.nnodes is {trainer.nnodes}; generation runs on one machine: cut the file and "
            "run the command on each machine with a part of it"
        )
        yield Fault(text, ("trainer.nnodes",))
    if trainer.controller == "ray":
        text = 'trainer.controller is "ray"; the engines are processes of this machine: use local'
        yield Fault(text, ("trainer.controller",))
    if trainer.n_gpus_per_node % tensor_parallel:
        text = (
            f"rollout.tensor_model_parallel_size is {tensor_parallel}; it must divide "
            f"trainer.n_gpus_per_node ({trainer.n_gpus_per_node}), so that every device has a place"
        )
        yield Fault(text, ("rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node"))


def output_faults(config: GenerationConfig) -> Iterator[Fault]:
    output = Path(config.data.output_path).expanduser()
    shown = config.data.output_path
    if "://" in shown:
        text = f"data.output_path is {shown}; it must be a local file, which can then be copied"
        yield Fault(text, ("data.output_path",))
    elif output.is_dir():
        yield Fault(
            f"data.output_path is {shown}, a folder; it must be a file", ("data.output_path",)
        )
    elif output.absolute() == Path(config.data.path).expanduser().absolute():
        text = f"data.output_path is {shown}, as is data.path; the input is never overwritten"
        yield Fault(text, ("data.output_path", "data.path"))


def is_greedy(config: GenerationConfig) -> bool:
    return config.rollout.temperature == 0 or not config.rollout.do_sample


def num_engines(config: GenerationConfig) -> int:
    """Engines that share the batches, if there are batches for all."""
    return config.trainer.n_gpus_per_node // config.rollout.tensor_model_parallel_size
