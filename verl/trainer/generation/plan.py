"""What is known before anything is loaded, and the lines that a person reads.

The rules between options of `main_generation`, the plan, what an earlier run has left, and the
summary. Nothing heavy is imported: mistakes are reported before torch is.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from verl.config.faults import Fault
from verl.config.generation import GenerationConfig
from verl.utils.import_utils import is_ray_available


def generation_faults(config: GenerationConfig) -> Iterator[Fault]:
    samples = config.data.n_samples
    if is_greedy(config) and samples > 1:
        key = "rollout.temperature is 0" if config.rollout.do_sample else "rollout.do_sample is off"
        text = (
            f"data.n_samples is {samples}, but {key}: all {samples} responses to a prompt would be "
            "equal; set data.n_samples=1, or sample at a temperature above 0"
        )
        yield Fault(text, ("data.n_samples", "rollout.temperature"))
    yield from device_faults(config)
    yield from output_faults(config)


def device_faults(config: GenerationConfig) -> Iterator[Fault]:
    trainer, tensor_parallel = config.trainer, config.rollout.tensor_model_parallel_size
    if trainer.nnodes > 1 and trainer.controller == "local":
        text = (
            f'trainer.nnodes is {trainer.nnodes}, but trainer.controller is "local"; engines on '
            "several machines need Ray: leave trainer.controller at auto"
        )
        yield Fault(text, ("trainer.nnodes", "trainer.controller"))
    elif (trainer.nnodes > 1 or trainer.controller == "ray") and not is_ray_available():
        text = 'several machines need Ray, which is not installed; pip install "verl[ray]"'
        yield Fault(text, ("trainer.nnodes", "trainer.controller"), is_about_machine=True)
    if trainer.n_gpus_per_node % tensor_parallel:
        text = (
            f"rollout.tensor_model_parallel_size is {tensor_parallel}; it must divide "
            f"trainer.n_gpus_per_node ({trainer.n_gpus_per_node}), so that every device is used"
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


@dataclass(frozen=True)
class Start:
    """What is about to be done."""

    num_rows: int
    num_sound: int
    num_kept: int
    folder: Path

    def lines(self, config: GenerationConfig) -> Iterator[str]:
        yield from plan_lines(config)
        without = self.num_rows - self.num_sound
        left_out = f", {without:,} of them without a usable prompt" if without else ""
        yield f"rows       {self.num_rows:,}{left_out}"
        if self.num_kept:
            yield f"resumed    {self.num_kept:,} rows are in {self.folder} already"


@dataclass
class Summary:
    """What was generated, this time and before; `seconds` are those of this run."""

    output: Path
    num_rows: int = 0
    num_responses: int = 0
    num_tokens: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    num_restarts: int = 0
    was_done: bool = False
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @classmethod
    def of_earlier_run(cls, output: Path) -> "Summary":
        return cls(output, was_done=True)

    def add(self, part: pa.Table) -> None:
        self.num_rows += part.num_rows
        for name in part["stop_reasons"].to_pylist():
            self.num_responses += len(name)
            self.stop_reasons.update(name)
        self.num_tokens += sum(map(sum, part["num_tokens"].to_pylist()))

    def ended(self) -> "Summary":
        self.seconds = time.monotonic() - self.started
        return self

    def lines(self) -> Iterator[str]:
        if self.was_done:
            yield f"{self.output} is complete already: same input, same settings"
            return
        mean = self.num_tokens / max(1, self.num_responses)
        yield f"generated  {self.num_responses:,} to {self.num_rows:,} rows, {mean:.1f} tokens each"
        cut = self.stop_reasons["length"]
        if cut:
            share = cut / self.num_responses
            yield f"cut off    {cut:,} ({share:.1%}) at rollout.response_length"
        if self.num_restarts:
            yield f"restarts   {self.num_restarts} of engines that were lost"
        yield f"time       {self.seconds:.1f} s in this run"
        yield f"written    {self.output}"


def plan_lines(config: GenerationConfig) -> Iterator[str]:
    """Everything that is known before the files are opened."""
    data, rollout = config.data, config.rollout
    how = f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}"
    nnodes = config.trainer.nnodes
    machines = f"{nnodes} machines of a Ray cluster with " if nnodes > 1 else ""
    yield f"prompts    {data.path} ({data.prompt_key}), at most {rollout.prompt_length} tokens"
    yield f"model      {config.model.path}"
    yield (
        f"responses  {data.n_samples} per prompt, at most {rollout.response_length} tokens, "
        f"{'greedy' if is_greedy(config) else how}"
    )
    yield (
        f"engines    {rollout.name} on {machines}{num_engines(config)} x "
        f"{rollout.tensor_model_parallel_size} device(s), {data.batch_size} prompts at a time"
    )
    yield f"output     {data.output_path}"
