"""The plan as text: what differs from the defaults, batch sizes, placement, memory, idle options.

Plain tables that fit 100 columns; colour appears on a terminal only.
"""

import sys
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl.config.async_plan import AsyncPlan, plan_of
from verl.config.effects import without_effect
from verl.config.faults import Fault
from verl.config.load import Loaded, load_config
from verl.config.schema import walk_leaves
from verl.config.validate import advice
from verl.trainer.plan.layout import BatchTable, Placement, batch_table, placement
from verl.trainer.plan.memory import BETWEEN_NODES, IN_NODE, MemoryPlan, memory_plan
from verl.trainer.plan.shape import length_notices

WIDTH = 100
GIB = 1024**3


@dataclass(frozen=True)
class Plan:
    """Everything a dry run prints."""

    changes: list[tuple[str, Any, Any]]
    batches: BatchTable
    schedule: AsyncPlan | None
    placement: Placement
    memory: MemoryPlan
    idle: list[tuple[str, str]]
    advice: list[str]
    missing: list[Fault]


def make_plan(loaded: Loaded, missing: list[Fault]) -> Plan:
    """`missing` are the faults about this machine, which a dry run only lists."""
    config = loaded.config
    return Plan(
        changes=changes(loaded),
        batches=batch_table(config),
        schedule=plan_of(config),
        placement=placement(config),
        memory=memory_plan(config),
        idle=without_effect(config, loaded.user_set),
        advice=[*advice(config), *length_notices(config)],
        missing=missing,
    )


def changes(loaded: Loaded) -> list[tuple[str, Any, Any]]:
    """Each key that the user set: its default and its value."""
    defaults = dict(walk_leaves(load_config({}, type(loaded.config)).config))
    values = dict(walk_leaves(loaded.config))
    keys = sorted(loaded.user_set - {"trainer.dry_run"})
    return [(key, looked_up(key, defaults), looked_up(key, values)) for key in keys]


def looked_up(key: str, values: dict[str, Any]) -> Any:
    """The value of an option, or of a key in a free dict; "" where there is none."""
    if key in values:
        return values[key]
    owner, _, name = key.rpartition(".")
    found = looked_up(owner, values) if owner else ""
    return found.get(name, "") if isinstance(found, dict) else ""


def print_plan(plan: Plan) -> None:
    """Write the plan to standard output; without colour when that is not a terminal."""
    page = StringIO()
    is_terminal = sys.stdout.isatty()
    Console(
        file=page, width=WIDTH, highlight=False, markup=False, force_terminal=is_terminal
    ).print(rendered(plan))
    sys.stdout.write("\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n")


def rendered(plan: Plan) -> Group:
    parts: list[RenderableType] = []
    parts += titled("Set by you", change_table(plan))
    parts += titled("Batch sizes", batch_sizes_table(plan.batches))
    if plan.schedule is not None:
        rows = async_rows(plan.schedule, plan.batches.responses_per_prompt)
        parts += titled("Asynchronous schedule", pairs(rows))
    parts += titled("Placement", placement_table(plan.placement))
    parts += titled("Memory per device (estimate)", memory_table(plan.memory))
    if plan.idle:
        idle = [f"{key}: {reason}" for key, reason in plan.idle]
        parts += titled("Set, but without effect", lines(idle))
    if plan.advice:
        parts += titled("Worth a look", lines(plan.advice))
    if plan.missing:
        parts += titled("Missing on this machine", lines([fault.text for fault in plan.missing]))
    return Group(*parts)


def titled(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(title, style="bold"), Padding(body, (0, 0, 1, 2))]


def change_table(plan: Plan) -> RenderableType:
    if not plan.changes:
        return Text("nothing: all options have their defaults")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("option", overflow="fold")
    table.add_column("default", style="dim", no_wrap=True, max_width=24)
    for key, default, value in plan.changes:
        table.add_row(f"{key}={value}", str(default))
    return table


def batch_sizes_table(batches: BatchTable) -> RenderableType:
    rows = [
        ("prompts per step", f"{batches.prompts:,}"),
        ("responses per prompt", f"{batches.responses_per_prompt:,}"),
        ("responses per step", f"{batches.sequences:,}, each at most {batches.longest:,} tokens"),
    ]
    for update in batches.updates:
        cut = counted(update.mini_batches, "mini-batch", "mini-batches")
        cut += f" x {update.epochs} epochs" if update.epochs > 1 else ""
        rows += [
            (
                f"{update.role}: optimizer steps per step",
                f"{update.optimizer_steps:,} ({cut})",
            ),
            (
                f"{update.role}: sequences per mini-batch",
                f"{update.sequences_per_mini_batch:,}, {update.sequences_per_rank:,} on each rank",
            ),
            (
                f"{update.role}: micro-batches per rank",
                f"{update.micro_batches} ({update.micro_batch})",
            ),
        ]
    return pairs(rows + schedule_rows(batches))


def schedule_rows(batches: BatchTable) -> list[tuple[str, str]]:
    plan = batches.schedule
    rows = []
    note = f" ({plan.note})" if plan.note else ""
    rows.append(("rows", f"{plan.rows:,}{note}" if plan.rows is not None else f"unknown{note}"))
    if plan.steps_per_epoch is not None:
        rows.append(("steps per epoch", f"{plan.steps_per_epoch:,}"))
    if plan.total_steps is not None:
        warmup = f", {plan.warmup_steps:,} of them warm-up" if plan.warmup_steps else ""
        rows.append(("training steps", f"{plan.total_steps:,}{warmup}"))
    return rows


def async_rows(plan: AsyncPlan, responses_per_prompt: int) -> list[tuple[str, str]]:
    """The numbers of an asynchronous run, and what waits for what."""
    batch, every = plan.batch, plan.sync_every
    most = plan.capacity(0)
    at_update = "go on with the new weights, keys and values " + (
        "are computed again" if plan.kv_after_update == "recompute" else "are kept"
    )
    when = (
        "when the data of the next step is complete; training and generation run side by side"
        if plan.lag
        else "when its step is trained; generation pauses meanwhile"
    )
    rows = [
        ("B, prompts of a training step", f"{batch:,}"),
        ("M, training steps per update", f"{every:,}"),
        ("s, share generated ahead", f"{plan.staleness:g}: {most - batch * every:,} prompts"),
        ("in flight", f"at most {most:,} prompts, {most * responses_per_prompt:,} responses"),
        (
            "age of responses",
            f"at most {counted(plan.max_staleness, 'step', 'steps')}: ceil((1 + s) M) - 1"
            + (" (on-policy)" if plan.is_on_policy else ""),
        ),
        ("a training step waits", f"for its {batch:,} prompts, in the order of the data"),
        ("prompt i waits", "until i < B x (steps in the rollout's weights + M) + s x M x B"),
        ("an update takes effect", when),
        ("rows that run then", at_update if plan.is_partial else "end with the old weights first"),
        ("a reply counts", f"{counted(plan.reply_tokens, 'token', 'tokens')} in the schedule"),
    ]
    if plan.update_tokens:
        rows.append(("a training step counts", f"at least {plan.update_tokens:,} tokens in it"))
    return rows


def placement_table(plan: Placement) -> RenderableType:
    nodes = counted(plan.nodes, "node", "nodes")
    ranks = f"{counted(plan.ranks, 'rank', 'ranks')} ({nodes} x {plan.ranks_per_node})"
    rows = [
        ("controller", plan.controller),
        ("device", f"{plan.device}, {ranks}"),
        *((role.role, f"{role.pool}: {role.layout}") for role in plan.roles),
    ]
    return pairs(rows)


def memory_table(plan: MemoryPlan) -> RenderableType:
    if plan.shape is None:
        return Text(f"unknown: {plan.reason}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    table.add_column("made of", overflow="fold")
    for phase in plan.phases:
        parts = [f"{name} {gib(size)}" for name, size in phase.parts.items() if size]
        table.add_row(phase.name, gib(phase.total), ", ".join(parts))
    sync = sync_line(plan)
    family = "" if plan.shape.is_family_known else ", counted like Llama"
    model = Text(f"{plan.shape.model_type}, {billions(plan.shape.params)} parameters{family}")
    return Group(model, table, *sync)


def sync_line(plan: MemoryPlan) -> list[Text]:
    """What an update of the rollout's weights takes, with what is assumed of the machines."""
    if plan.sync is None:
        return []
    text = f"weight update: {plan.sync.how}"
    if plan.sync.num_bytes:
        text += (
            f"; {gib(plan.sync.num_bytes)} GiB in about {plan.sync.seconds:.1f} s at "
            f"{IN_NODE / 1e9:.0f} GB/s in a node and {BETWEEN_NODES / 1e9:.0f} GB/s between nodes"
        )
    return [Text(text)]


def counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def gib(size: float) -> str:
    value = size / GIB
    return f"{value:.1f}" if value >= 0.05 else f"{value:.3f}"


def billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def lines(texts: list[str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for text in texts:
        table.add_row("-", text)
    return table
