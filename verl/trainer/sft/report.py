"""What a supervised run says about itself: the metrics of a step, and a summary at the end.

Speed is counted over all tokens of the step's rows, on all ranks. MFU is the share of the devices'
published bf16 peak that the arithmetic of a full training step comes to; where no peak is published
(a CPU), or where most of that arithmetic is saved (LoRA), it is left out.
"""

import math
from dataclasses import dataclass

from verl.workers.engine.base import TrainResult

Metrics = dict[str, float]
TOKENS_PER_UNIT = 1e9


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What one step went through, summed over the ranks."""

    num_trained_tokens: int
    """Tokens that have a loss."""

    num_tokens: int
    flops: float
    """NaN where they are not counted."""


def step_metrics(
    result: TrainResult,
    counts: StepCounts,
    *,
    seconds: float,
    num_tokens_so_far: int,
    peak_flops: float,
) -> Metrics:
    """Under the names that users of both SFT trainers know; the peak is that of all ranks."""
    metrics = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.learning_rate,
        "train/lr(1e-3)": result.learning_rate * 1e3,
        "train/time(s)": seconds,
        "train/global_tokens": float(counts.num_tokens),
        "train/trained_tokens": float(counts.num_trained_tokens),
        "train/total_tokens(B)": num_tokens_so_far / TOKENS_PER_UNIT,
        "train/tokens_per_second": counts.num_tokens / seconds,
    }
    mfu = counts.flops / seconds / peak_flops
    if mfu > 0:  # NaN: not counted; 0: no peak is known
        metrics["train/mfu"] = mfu
    return metrics


@dataclass
class RunSummary:
    """Collected while the run goes on; `text` is for the person who started it."""

    total_steps: int
    first_step: int = 0
    """Steps that an earlier start had done."""

    last_step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    first_loss: float = math.nan
    last_loss: float = math.nan
    val_loss: float = math.nan
    last_mfu: float = math.nan
    num_skipped: int = 0

    def add(self, step: int, metrics: Metrics) -> None:
        if math.isnan(self.first_loss):
            self.first_loss = metrics["train/loss"]
        self.last_step, self.last_loss = step, metrics["train/loss"]
        self.num_tokens += int(metrics["train/global_tokens"])
        self.seconds += metrics["train/time(s)"]
        self.val_loss = metrics.get("val/loss", self.val_loss)
        self.last_mfu = metrics.get("train/mfu", math.nan)

    @property
    def text(self) -> str:
        if self.last_step == self.first_step:
            return f"nothing left to train: step {self.first_step} of {self.total_steps} was done"
        loss = f"{self.first_loss:.4f} at step {self.first_step + 1}, {self.last_loss:.4f} now"
        if not math.isnan(self.val_loss):
            loss += f", {self.val_loss:.4f} on held-out rows"
        mfu = "no MFU" if math.isnan(self.last_mfu) else f"MFU {self.last_mfu:.1%}"
        speed = f"{self.num_tokens / self.seconds:,.0f} tokens/s, {mfu}"
        lines = {
            "steps": f"{self.last_step} of {self.total_steps}",
            "tokens": f"{self.num_tokens:,} in {self.seconds:.1f} s of training",
            "speed": speed,
            "loss": loss,
        }
        if self.first_step:
            lines["steps"] += f", {self.first_step} of them before this start"
        if self.num_skipped:
            lines["skipped"] = f"{self.num_skipped} steps whose gradients were not finite"
        return "\n".join(f"{name:9}{value}" for name, value in lines.items())
