"""The simulator of asynchronous runs: the run's own schedule, with seconds."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.long_tail import length_of
from verl.config.async_plan import AsyncPlan
from verl.trainer import plan_async
from verl.trainer.plan_async import Costs, Recorded, predict, segments_of
from verl.utils.scramble import keyed_seed

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "async.json"
COSTS = Costs(0.004, 1e-5, 2e-6, 1e-5, 0.1)


def heavy_tail(steps=24, rows=64):
    options = Namespace(rows=rows, median=30, longest=400, steps=steps)
    plan, found, _ = plan_async.synthetic(options)
    return plan, found


def timed(plan, steps, costs=COSTS):
    """The steps with the seconds that they would take."""
    segments = segments_of(plan, steps)
    return [
        step._replace(
            generating=segment.seconds(costs),
            training=costs.per_update
            + costs.per_trained * (sum(step.lengths) + step.prompts * len(step.lengths)),
        )
        for step, segment in zip(steps, segments, strict=True)
    ]


@pytest.mark.parametrize("recorded_ahead", [0, 1, 3])
def test_costs_are_found_from_one_run_and_foretell_another(tmp_path, recorded_ahead):
    plan, steps = heavy_tail()
    plan = replace(plan, staleness=float(recorded_ahead))
    path = tmp_path / "timeline.jsonl"
    lines = [{"plan": vars(plan)}]
    lines += [{"step": n, **s._asdict()} for n, s in enumerate(timed(plan, steps), 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read, found = plan_async.read_timeline(path)
    costs = plan_async.fitted((read, found))
    for ahead in (0, 1, 2, 4):
        other = replace(plan, staleness=float(ahead))
        foretold = predict(other, found, costs).seconds_per_step
        assert foretold == pytest.approx(predict(other, steps, COSTS).seconds_per_step, rel=0.05)


def measured(mode, ahead):
    """A run on the H200: what its steps took, with the lengths that their seeds gave."""
    modes, recorded = json.loads(MEASURED.read_text())["runs"][-1]["modes"], []
    for number, step in enumerate(modes[mode]["steps"], 1):
        seeds = [
            keyed_seed(0, "training", number, f"{number}-{row}", sample)
            for row in range(32)
            for sample in range(8)
        ]
        lengths = [length_of(seed, 300, 0.99, 4096) for seed in seeds]
        assert sum(lengths) / len(lengths) == pytest.approx(step["response_length/mean"])
        waited = step["timing_s/gen"] + step.get("timing_s/settle", 0.0)
        training = step["timing_s/step"] - waited
        recorded.append(Recorded(lengths, [0] * len(lengths), 256, waited, training))
    return (AsyncPlan(batch=32, staleness=float(ahead)), recorded), modes[mode]["seconds_per_step"]


def test_two_measured_runs_foretell_a_third_within_ten_per_cent():
    runs = {
        ahead: measured(mode, ahead)
        for mode, ahead in {"sync": 0, "ahead_1": 1, "ahead_3": 3}.items()
    }
    for unknown, (of_unknown, seconds) in runs.items():
        costs = plan_async.fitted(*(run for ahead, (run, _) in runs.items() if ahead != unknown))
        foretold = predict(*of_unknown, costs).seconds_per_step
        if unknown:
            assert foretold == pytest.approx(seconds, rel=0.1)
        else:  # two of its steps compiled kernels: 8.7 s without them
            assert foretold == pytest.approx(8.7, rel=0.12)


def test_a_synchronous_step_takes_its_longest_row_and_its_training():
    step = Recorded([5, 1, 1, 1], [0] * 4, 2, 0.0, 0.0)
    plan, _ = heavy_tail()
    found = predict(replace(plan, batch=1), [step, step], Costs(1.0, 0.5, 0.0, 0.25, 3.0))
    assert found.seconds_per_step == 5 * 1.0 + 8 * 0.5 + 3.0 + 0.25 * (8 + 2 * 4)
    assert (found.mean_age, found.ratio_spanning) == (0.0, 0.0)


def test_beside_generation_the_slower_of_the_two_counts():
    step = Recorded([4], [0], 0, 0.0, 0.0)
    plan, _ = heavy_tail()
    beside = replace(plan, batch=1, staleness=1.0, lag=1, is_partial=False)
    for training in (1.0, 100.0):
        found = predict(beside, [step] * 50, Costs(1.0, 0.0, 0.0, 0.0, training))
        assert found.seconds_per_step == pytest.approx(max(4.0, training), rel=0.1)


def test_the_command_prints_a_table(capsys):
    plan_async.main(["--synthetic", "--rows", "64", "--steps", "8", "--staleness", "0", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("| batches ahead | s a step |")
    assert [line.split("|")[1].strip() for line in lines[3:]] == ["0", "1"]
