"""Numbers of a step and the summary of a run, worked by hand."""

import math

import pytest

from verl.trainer.sft.trainer import RunSummary, StepCounts, step_metrics
from verl.workers.engine.base import TrainResult

RESULT = TrainResult(
    loss=1.5, grad_norm=2.0, learning_rate=3e-4, is_applied=True, num_micro_batches=1
)


def metrics(*, flops=4e12, peak_flops=8e12, loss=1.5):
    result = TrainResult(**{**vars(RESULT), "loss": loss})
    counts = StepCounts(num_trained_tokens=600, num_tokens=1000, flops=flops)
    return step_metrics(
        result, counts, seconds=2.0, num_tokens_so_far=5_000_000, peak_flops=peak_flops
    )


def test_a_step_reports_speed_and_the_share_of_the_peak():
    found = metrics()
    assert found["train/tokens_per_second"] == 500
    assert found["train/total_tokens(B)"] == pytest.approx(0.005)
    assert found["train/lr(1e-3)"] == pytest.approx(0.3)
    assert found["train/mfu"] == pytest.approx(0.25)  # 4 TFLOP in 2 s on devices of 8 TFLOP/s


@pytest.mark.parametrize("unknown", [{"flops": math.nan}, {"peak_flops": math.inf}])
def test_what_is_not_known_is_left_out_rather_than_zero(unknown):
    assert "train/mfu" not in metrics(**unknown)


def test_the_summary_tells_the_run_in_five_lines():
    summary = RunSummary(total_steps=10, first_step=2, last_step=2, num_skipped=1)
    summary.add(3, metrics(loss=1.5))
    summary.add(4, {**metrics(loss=1.25), "val/loss": 1.125})
    assert summary.text.splitlines() == [
        "steps    4 of 10, 2 of them before this start",
        "tokens   2,000 in 4.0 s of training",
        "speed    500 tokens/s, MFU 25.0%",
        "loss     1.5000 at step 3, 1.2500 now, 1.1250 on held-out rows",
        "skipped  1 steps whose gradients were not finite",
    ]


def test_a_run_without_a_step_says_so():
    summary = RunSummary(total_steps=10, first_step=10, last_step=10)
    assert summary.text == "nothing left to train: step 10 of 10 was done"
