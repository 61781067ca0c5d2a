"""The batch sizes of a step and the ranks that work on them.

With P prompts per step, n responses each, mini-batches of M prompts and D data-parallel ranks:

    sequences per step       = P * n
    mini-batches per pass    = P / M
    optimizer steps per step = P / M * epochs
    sequences per mini-batch and rank = M * n / D
    micro-batches per rank   = that / micro-batch size, rounded up (or as many as tokens require)

`data.train_batch_size` and `ppo_mini_batch_size` count prompts; what is per GPU counts sequences.
`placement` has the controller, the ranks of each role, and the engines that generate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from verl.config.data import READABLE
from verl.config.engine import FSDPEngineConfig
from verl.config.faults import Fault
from verl.config.roles import (
    data_parallel_size,
    engine_has_whole_weights,
    engine_of,
    is_own_reference,
    needs_critic,
    needs_reference,
    pool_devices,
    ranks_beside,
    ranks_per_sequence,
    replicas,
    role_ranks,
    runs_prime,
    teacher_ranks,
    world_size,
)
from verl.trainer.plan.megatron import megatron_layout


@dataclass(frozen=True)
class UpdateSizes:
    """How one role's update is cut up."""

    role: str
    mini_batches: int
    epochs: int
    sequences_per_mini_batch: int
    sequences_per_rank: int
    micro_batch: str
    micro_batches: str

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs


@dataclass(frozen=True)
class Schedule:
    """How long the run is; None where the number of rows is not known."""

    rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    warmup_steps: int | None
    note: str = ""


@dataclass(frozen=True)
class BatchTable:
    """Every count that a training step involves."""

    prompts: int
    responses_per_prompt: int
    longest: int
    updates: list[UpdateSizes]
    schedule: Schedule

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses_per_prompt


def batch_table(config: Any) -> BatchTable:
    updates = [update_sizes(config, "actor", config.actor_rollout_ref.actor)]
    if needs_critic(config):
        updates.append(update_sizes(config, "critic", config.critic))
    return BatchTable(
        prompts=config.data.train_batch_size,
        responses_per_prompt=config.actor_rollout_ref.rollout.n,
        longest=config.data.max_prompt_length + config.data.max_response_length,
        updates=updates,
        schedule=schedule(config),
    )


def update_sizes(config: Any, role: str, section: Any) -> UpdateSizes:
    ranks = data_parallel_size(config, "critic" if role == "critic" else "actor_rollout_ref")
    n, mini = config.actor_rollout_ref.rollout.n, section.ppo_mini_batch_size
    per_rank = mini * n // ranks
    if section.use_dynamic_bsz:
        micro = f"by tokens, budget {section.ppo_max_token_len_per_gpu:,}"
        longest = config.data.max_prompt_length + config.data.max_response_length
        most = math.ceil(per_rank * longest / section.ppo_max_token_len_per_gpu)
        count = f"at most {most:,}"
    else:
        size = section.ppo_micro_batch_size_per_gpu
        micro = f"{size:,} sequences"
        count = f"{math.ceil(per_rank / size):,}"
    return UpdateSizes(
        role=role,
        mini_batches=max(1, config.data.train_batch_size // mini),
        epochs=section.ppo_epochs,
        sequences_per_mini_batch=mini * n,
        sequences_per_rank=per_rank,
        micro_batch=micro,
        micro_batches=count,
    )


def schedule(config: Any) -> Schedule:
    """Steps and warm-up; the last, incomplete batch of an epoch is dropped."""
    rows, note = row_count(config.data.train_files)
    if rows is not None and config.data.train_max_samples > 0:
        rows = min(rows, config.data.train_max_samples)
    size = config.data.train_batch_size
    per_epoch = rows // size if rows is not None and size else None
    total = config.trainer.total_training_steps
    if total is None and per_epoch is not None:
        total = per_epoch * config.trainer.total_epochs
    optim = config.actor_rollout_ref.actor.optim
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else None
    if warmup is None and total is not None:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    if rows is not None and config.data.filter_overlong_prompts:
        note = "before overlong prompts are dropped"
    return Schedule(rows, per_epoch, total, warmup, note)


def row_faults(config: Any) -> Iterator[Fault]:
    """Files that no run can start with, as far as their names and parquet's metadata tell.

    A dataset class of one's own reads what it likes.
    """
    if config.data.custom_cls.path is not None:
        return
    for option in ("train_files", "val_files"):
        files = config.data[option] or []
        for name in files if isinstance(files, list) else [files]:
            fault = file_fault(name, config.data.prompt_key)
            if fault is not None:
                yield Fault(f"data.{option} ({name}) {fault}", (f"data.{option}",))
                return
    rows, _ = row_count(config.data.train_files)
    batch = config.data.train_batch_size
    if rows == 0:
        text = f"data.train_files ({config.data.train_files}) has no rows"
        yield Fault(text, ("data.train_files",))
    elif rows is not None and rows < batch and config.data.datagen.path is None:
        text = (
            f"data.train_files ({config.data.train_files}) has {rows} rows and "
            f"data.train_batch_size is {batch}; lower data.train_batch_size or add rows"
        )
        yield Fault(text, ("data.train_batch_size", "data.train_files"))


def file_fault(name: str, prompt_key: str) -> str | None:
    """Why the rows of a file cannot be prompts, or None."""
    path = Path(name).expanduser()
    if path.suffix not in READABLE:
        return (
            f"is neither {', '.join(READABLE[:-1])} nor {READABLE[-1]}; convert it, for example "
            "with pandas and to_parquet"
        )
    if path.suffix != ".parquet" or not path.is_file():
        return None
    try:
        columns = parquet.read_schema(path).names
    except (pa.ArrowInvalid, OSError) as error:
        return f"cannot be read: {error}"
    if prompt_key in columns:
        return None
    return (
        f"has no column {prompt_key!r} (data.prompt_key); its columns are {columns}. Name the one "
        "with the prompts in data.prompt_key"
    )


def row_count(files: str | list[str]) -> tuple[int | None, str]:
    """Rows of all parquet files, or None and the reason."""
    rows = 0
    for name in files if isinstance(files, list) else [files]:
        path = Path(name).expanduser()
        if path.suffix != ".parquet":
            return None, f"rows are counted in parquet files only, not in {name}"
        if not path.is_file():
            return None, f"{name} is not here"
        rows += parquet.ParquetFile(path).metadata.num_rows
    return rows, ""


@dataclass(frozen=True)
class RolePlacement:
    """One role, where it runs and how its model is spread."""

    role: str
    pool: str
    layout: str


@dataclass(frozen=True)
class Placement:
    """The whole run."""

    controller: str
    device: str
    nodes: int
    ranks_per_node: int
    roles: list[RolePlacement]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def placement(config: Any) -> Placement:
    roles = [RolePlacement("actor", pool(config, "actor_rollout_ref"), layout(config, "actor"))]
    roles.append(rollout_placement(config))
    if needs_reference(config):
        how = "the actor without its adapters" if is_own_reference(config) else "a frozen copy"
        roles.append(RolePlacement("reference", pool(config, "actor_rollout_ref"), how))
    if needs_critic(config):
        roles.append(RolePlacement("critic", pool(config, "critic"), layout(config, "critic")))
    if config.reward_model.enable:
        roles.append(reward_placement(config))
    return Placement(
        controller=controller(config),
        device=config.trainer.device,
        nodes=config.trainer.nnodes,
        ranks_per_node=config.trainer.n_gpus_per_node,
        roles=roles,
    )


def controller(config: Any) -> str:
    """Who starts the workers; `auto` is this process for one device and Ray otherwise."""
    if config.trainer.controller != "auto":
        return config.trainer.controller
    num_ranks = world_size(config) + ranks_beside(config) + teacher_ranks(config)
    return "local" if num_ranks == 1 else "ray"


def pool(config: Any, role: str) -> str:
    devices = pool_devices(config, role)
    if devices is None:
        return "all ranks"
    return "devices " + ", ".join(map(str, devices))


def layout(config: Any, role: str) -> str:
    name = "critic" if role == "critic" else "actor_rollout_ref"
    engine, ranks = engine_of(config, name), role_ranks(config, name)
    if not isinstance(engine, FSDPEngineConfig):
        return f"megatron: {megatron_layout(config, name)}"
    if ranks == 1:
        return "one device, not sharded"
    shards = engine.fsdp_size if engine.fsdp_size > 0 else ranks
    sharded = f"fsdp over {shards} ranks"
    if shards < ranks:
        sharded += f", {ranks // shards} copies"
    whole = f"whole on each of {ranks} ranks, the optimizer's state sharded"
    either = f"{whole}, if that fits; else {sharded}"
    text = {"full": sharded, "zero1": whole, "auto": either}[engine.sharding]
    if ranks_per_sequence(engine) > 1:
        text += f", {ranks_per_sequence(engine)} ranks share a sequence"
    return text


def rollout_placement(config: Any) -> RolePlacement:
    rollout = config.actor_rollout_ref.rollout
    count = replicas(config)
    engines = "1 engine" if count == 1 else f"{count} engines"
    text = f"{rollout.name}, {engines}, tensor parallel {rollout.tensor_model_parallel_size}"
    if not config.actor_rollout_ref.hybrid_engine:
        return RolePlacement("rollout", rollout_pool(config), f"{text}, weights sent by the actor")
    if rollout.name == "native" and engine_has_whole_weights(config):
        text += ", on the trainer's own weights"
    return RolePlacement("rollout", pool(config, "actor_rollout_ref"), text)


def rollout_pool(config: Any) -> str:
    """Where ranks are that only generate."""
    rollout = config.actor_rollout_ref.rollout
    if ranks_beside(config):
        return f"a pool of {rollout.nnodes} x {rollout.n_gpus_per_node}"
    return pool(config, "rollout")


def reward_placement(config: Any) -> RolePlacement:
    model = config.reward_model
    where = pool(config, "reward_model")
    if model.enable_resource_pool:
        where = f"a pool of {model.nnodes} x {model.n_gpus_per_node}"
    how = f"{model.rollout.name}, {model.model.path}"
    if "megatron" in model:
        how = f"{model.strategy}, {model.model.path}"
    if runs_prime(config):
        how = f"implicit and trained, not in the memory below, {model.model.path}"
    return RolePlacement("reward model", where, how)
