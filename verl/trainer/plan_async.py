"""When asynchronous training pays: a run's lengths and times under other settings.

    python -m verl.trainer.plan_async TIMELINE.jsonl ... [--staleness 0 1 2 4 8] [--lag 0]
    python -m verl.trainer.plan_async --synthetic --rows 512 --median 300 --longest 4096

An asynchronous run writes `timeline.jsonl` beside its checkpoints: for every step the lengths of
its rows and the seconds of its parts (a run with `num_warmup_batches=0` is synchronous and writes
it too). The schedule of `verl.agent_loop.schedule` is run on these lengths, so what starts when and
what crosses which update is not estimated. Seconds are:

    generation   a * decode steps + b * tokens + r * tokens computed again after an update
    training     c * tokens of the step + d

fitted to the timelines, or given. The steps of one run are much alike and tell little of settings
that differ from its own; with those of two runs, say one synchronous and one far ahead, what lies
between is interpolated. The lengths are those of the first. Devices share rows evenly; `--devices`
other than the recorded number divides tokens, not decode steps.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.agent_loop.schedule import Schedule
from verl.config.async_plan import AsyncPlan


class Recorded(NamedTuple):
    """One step of a timeline."""

    lengths: list[int]
    """Tokens of each row."""

    replies: list[int]
    prompts: int
    """Tokens of a prompt, on average."""

    generating: float
    training: float


class Costs(NamedTuple):
    """Seconds of things."""

    per_decode_step: float
    per_token: float
    per_recomputed: float
    per_trained: float
    per_update: float


@dataclass
class Segment:
    """What is generated between two updates."""

    ticks: int = 0
    tokens: int = 0
    recomputed: int = 0
    spans: int = 0
    """Rows that went on across the update at its end."""

    age: float = 0.0
    """Mean age of the tokens of the step that the update contains."""

    def seconds(self, costs: Costs, devices: float = 1.0) -> float:
        computed = self.tokens * costs.per_token + self.recomputed * costs.per_recomputed
        return self.ticks * costs.per_decode_step + computed / devices


def read_timeline(path: Path) -> tuple[AsyncPlan, list[Recorded]]:
    """The plan of the run and its steps, in order; a step that was made twice counts once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    plan, steps = None, {}
    for line in lines:
        if "plan" in line:
            plan = AsyncPlan(**line["plan"])
        else:
            number = line.pop("step")
            steps[number] = Recorded(**line)
    if plan is None or not steps:
        raise ValueError(f"{path} has no plan and steps; it is not the timeline of a run")
    return plan, [steps[number] for number in sorted(steps)]


def segments_of(plan: AsyncPlan, steps: Sequence[Recorded]) -> list[Segment]:
    """Run the schedule over the lengths; one segment per update, the last steps included."""
    num_steps = len(steps) - len(steps) % plan.sync_every
    schedule = Schedule(plan, num_steps * plan.batch)
    num_started, segments = 0, []
    rows: list[tuple[int, int, int, int]] = []  # step, start, end, replies
    clocks = [0]
    while schedule.published < num_steps:
        while num_started < schedule.limit:
            number, place = divmod(num_started, plan.batch)
            lengths, replies = steps[number].lengths, steps[number].replies
            share = len(lengths) // plan.batch
            for row in range(place * share, (place + 1) * share):
                clock = schedule.begin(num_started)
                virtual = lengths[row] + plan.reply_tokens * replies[row]
                rows.append((number, clock.clock, clock.clock + virtual, replies[row]))
                schedule.advance(clock, virtual)
                schedule.end(clock)
            num_started += 1
        until = schedule.update_clock()
        segment, last = Segment(ticks=until - clocks[-1]), clocks[-1]
        prompt = steps[schedule.published].prompts
        for _, start, end, _ in rows:
            segment.tokens += max(0, min(end, until) - max(start, last))
            if start < until < end:
                segment.spans += 1
                segment.recomputed += prompt + until - start
        first = schedule.published
        schedule.publish(until)
        clocks.append(until)
        trained = [row for row in rows if first <= row[0] < schedule.published]
        segment.age = mean_age(trained, clocks, plan)
        rows = [row for row in rows if row[0] >= schedule.published]
        segments.append(segment)
    return segments


def mean_age(
    rows: Sequence[tuple[int, int, int, int]], clocks: Sequence[int], plan: AsyncPlan
) -> float:
    """Steps between the weights that sampled a token and those it is trained on, on average."""
    total = num = 0.0
    for step, start, end, _ in rows:
        for version, (begin, until) in enumerate(zip(clocks, [*clocks[1:], end], strict=False)):
            tokens = max(0, min(end, max(until, begin)) - max(start, begin))
            total += tokens * max(0, step - version * plan.sync_every)
            num += tokens
    return total / num if num else 0.0


def fitted(*runs: tuple[AsyncPlan, Sequence[Recorded]]) -> Costs:
    """Costs that explain the recorded seconds of all runs best; none is negative.

    In the first update of a run kernels are compiled and nothing is ready, so it does not count
    where there are others.
    """
    generated, trained = [], []
    for plan, steps in runs:
        segments, every = segments_of(plan, steps), plan.sync_every
        generated += [
            ([s.ticks, s.tokens, s.recomputed], sum(step.generating for step in batch))
            for at, s in enumerate(segments)
            if (batch := steps[at * every : (at + 1) * every]) and (at or len(segments) == 1)
        ]
        trained += [
            ([sum(step.lengths) + step.prompts * len(step.lengths), 1], step.training)
            for step in steps[1:] or steps
        ]
    a, b, r = not_negative(*zip(*generated, strict=True))
    c, d = not_negative(*zip(*trained, strict=True))
    return Costs(a, b, r, c, d)


def not_negative(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares; columns whose weight would be negative are left out, worst first."""
    matrix, target = np.array(columns, dtype=float), np.array(values, dtype=float)
    used = [at for at in range(matrix.shape[1]) if matrix[:, at].any()]
    weights = np.zeros(matrix.shape[1])
    while used:
        scale = matrix[:, used].max(0)
        found = np.linalg.lstsq(matrix[:, used] / scale, target, rcond=None)[0] / scale
        if (found >= 0).all():
            weights[used] = found
            break
        del used[int(np.argmin(found * scale))]
    return weights.tolist()


class Prediction(NamedTuple):
    """What a plan would take."""

    seconds_per_step: float
    idle_generation: float
    """Share of the time in which nothing is generated."""

    mean_age: float
    ratio_spanning: float


def predict(
    plan: AsyncPlan, steps: Sequence[Recorded], costs: Costs, devices: float = 1.0
) -> Prediction:
    """Lay the segments out in time: one after the other, or beside training."""
    segments = segments_of(plan, steps)
    num_steps = len(segments) * plan.sync_every
    clock = generating = trained_at = 0.0
    for number, segment in enumerate(segments):
        seconds = segment.seconds(costs, devices)
        generating += seconds
        batch = steps[number * plan.sync_every : (number + 1) * plan.sync_every]
        training = sum(
            costs.per_update
            + costs.per_trained * (sum(s.lengths) + s.prompts * len(s.lengths)) / devices
            for s in batch
        )
        if plan.lag == 0:
            clock += seconds + training
            continue
        # The data of a step is complete at the end of the segment before its update; it is trained
        # on while the next segment is generated, and the update waits for both.
        clock = max(clock + seconds, trained_at)
        trained_at = clock + training
    clock = max(clock, trained_at)
    rows = sum(len(step.lengths) for step in steps[:num_steps])
    spans = sum(segment.spans for segment in segments)
    age = float(np.mean([segment.age for segment in segments]))
    return Prediction(clock / num_steps, 1 - generating / clock, age, spans / rows)


def synthetic(options: argparse.Namespace) -> tuple[AsyncPlan, list[Recorded], Costs]:
    """Steps with log-normal lengths and round costs: 4 ms a decode step, 10 us a token."""
    draw = np.random.default_rng(0)
    spread = math.log(10) / 2.326  # the 99th percentile is ten medians
    steps = []
    for _ in range(options.steps):
        lengths = np.exp(draw.normal(math.log(options.median), spread, options.rows))
        whole = np.clip(lengths.round(), 1, options.longest).astype(int)
        steps.append(Recorded(whole.tolist(), [0] * options.rows, 256, 0.0, 0.0))
    plan = AsyncPlan(batch=max(1, options.rows // 8))
    return plan, steps, Costs(0.004, 1e-5, 2e-6, 1e-5, 0.1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: one line for each number of batches ahead."""
    parser = argparse.ArgumentParser(
        "python -m verl.trainer.plan_async", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("timelines", type=Path, nargs="*", help="timeline.jsonl of runs")
    parser.add_argument("--synthetic", action="store_true", help="lengths of a heavy tail")
    parser.add_argument("--staleness", type=float, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--sync-every", type=int, default=1)
    parser.add_argument("--lag", type=int, choices=(0, 1), default=0)
    parser.add_argument("--devices", type=float, default=1.0, help="times the recorded ones")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--median", type=int, default=300)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.synthetic == bool(options.timelines):
        parser.error("name timelines, or --synthetic")
    if options.synthetic:
        plan, steps, costs = synthetic(options)
    else:
        runs = [read_timeline(path) for path in options.timelines]
        (plan, steps), costs = runs[0], fitted(*runs)
    write = sys.stdout.write
    write(f"{len(steps)} steps of {len(steps[0].lengths)} rows; seconds: {shown(costs)}\n")
    write("| batches ahead | s a step | of the first | mean age | rows across an update | idle |\n")
    write("|---|---|---|---|---|---|\n")
    first: float | None = None
    for staleness in options.staleness:
        terms: dict[str, Any] = {**vars(plan), "staleness": staleness / options.sync_every}
        terms |= {"sync_every": options.sync_every, "lag": options.lag if staleness else 0}
        longest = max(length for step in steps for length in step.lengths)
        in_flight = math.ceil(staleness + options.sync_every)
        terms["update_tokens"] = longest // in_flight if terms["lag"] else 0
        found = predict(AsyncPlan(**terms), steps, costs, options.devices)
        first = first or found.seconds_per_step
        write(
            f"| {staleness:g} | {found.seconds_per_step:.3g} | "
            f"{found.seconds_per_step / first:.2f} | {found.mean_age:.2f} | "
            f"{found.ratio_spanning:.0%} | {found.idle_generation:.0%} |\n"
        )


def shown(costs: Costs) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in costs._asdict().items())


if __name__ == "__main__":
    main()
