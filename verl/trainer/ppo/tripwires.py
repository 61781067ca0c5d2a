"""Signs that a run is not doing what its owner thinks, reported once and counted ever after.

Each rule looks at the metrics of a step. The first time one is broken a warning says what it means;
from then on `tripwire/<name>` counts the steps. Steps with values that are not finite are handled
where they occur (`NonFiniteValues`); here they are counted, and three in a row end the run.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.data_plane.batch import StoredBatch
from verl.protocol import DataProto
from verl.utils.environment import WentWrong

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]

MAX_LOG_PROB_ERROR = 0.05
"""Nats per token between the old log-probabilities and those at the start of the update."""

MAX_START_DISTANCE = 0.01
"""Nats per token between the policy and its reference before the first update."""

MAX_TRUNCATED_RATIO = 0.5
COLLAPSED_ENTROPY = 0.01
MAX_BAD_STEPS_IN_A_ROW = 3


class NonFiniteValues(ArithmeticError):
    """A batch holds NaN or infinity, so that a step with it would spoil the weights."""

    def __init__(self, batch: DataProto, columns: list[str]) -> None:
        super().__init__(f"{', '.join(columns)} of the batch hold values that are not finite")
        self.batch = batch
        self.columns = columns


class TooManyBadSteps(WentWrong, RuntimeError):
    """Steps in a row could not be made; the last checkpoint is as it was."""


def require_finite(batch: DataProto, *names: str) -> None:
    """Raise `NonFiniteValues` if one of these columns holds NaN or infinity on a response token."""
    broken = not_finite(batch, *names)
    if broken:
        raise NonFiniteValues(batch, broken)


def not_finite(batch: DataProto, *names: str) -> list[str]:
    """Those of the columns that hold NaN or infinity on a response token."""
    mask = batch.batch["response_mask"].bool()
    return [
        name
        for name in names
        if name in batch.batch.keys() and not torch.isfinite(batch.batch[name][mask]).all()  # noqa: SIM118
    ]


def keep_for_replay(batch: DataProto | StoredBatch, folder: Path, step: int) -> Path:
    """Write the tensors of a batch to disk; `DataProto.load_from_disk` gives it back."""
    batch = batch.fetch() if isinstance(batch, StoredBatch) else batch
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    kept = batch.select(
        non_tensor_batch_keys=["uid", "data_source"],
        meta_info_keys=["temperature", "old_policy_version"],
    )
    path = folder / f"step_{step}.safetensors"
    kept.save_to_disk(path)
    return path


@dataclass(frozen=True)
class Rule:
    """`is_broken` gets the metrics of a step and those of the first step."""

    name: str
    is_broken: Callable[[Metrics, Metrics], bool]
    meaning: str


def _above(key: str, limit: float) -> Callable[[Metrics, Metrics], bool]:
    return lambda now, first: bool(now.get(key, 0.0) > limit)


def _starts_away_from_reference(now: Metrics, first: Metrics) -> bool:
    return now is first and now.get("actor/ref_distance", 0.0) > MAX_START_DISTANCE


def _has_collapsed(now: Metrics, first: Metrics) -> bool:
    start = first.get("actor/entropy", math.inf)
    return now.get("actor/entropy", math.inf) < min(COLLAPSED_ENTROPY, 0.1 * start)


RULES = (
    Rule(
        "ratio_not_one",
        _above("actor/old_log_prob_error", MAX_LOG_PROB_ERROR),
        "before the first optimizer step the policy gives its own responses other log-probs than a "
        "moment ago; the same forward pass is computed in two different ways",
    ),
    Rule(
        "rollout_mismatch",
        _above("training/rollout_probs_diff_mean", MAX_LOG_PROB_ERROR),
        "the engine that generates and the model that trains disagree about the probabilities of "
        "the sampled tokens; the rollout may run with other weights or settings, or draw with "
        "filters (top-k, top-p, penalties), which training does not know",
    ),
    Rule(
        "reference_differs_at_start",
        _starts_away_from_reference,
        "before the first update the policy is not its own reference: their log-probs differ",
    ),
    Rule(
        "equal_rewards",
        _above("reward/ratio_groups_without_spread", 1 - 1e-9),
        "all responses to each prompt have the same reward, so there is nothing to learn from; "
        "look at the reward function, or at data that is neither too easy nor too hard",
    ),
    Rule(
        "reward_errors",
        _above("reward/num_errors", 0),
        "the reward function failed on some responses; their prompts were graded again or dropped",
    ),
    Rule(
        "truncated_responses",
        _above("rollout/truncated_ratio", MAX_TRUNCATED_RATIO),
        "most responses are cut off at data.max_response_length before they end",
    ),
    Rule(
        "skipped_updates",
        _above("actor/num_skipped_steps", 0),
        "a loss or gradient was not finite, and the optimizer step was left out",
    ),
    Rule(
        "entropy_collapse",
        _has_collapsed,
        "the policy has become almost deterministic; it no longer explores",
    ),
)


class Tripwires:
    """Counts of broken rules over a run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bad_steps_in_a_row = 0
        self._first: Metrics | None = None

    def check(self, metrics: Metrics, step: int) -> dict[str, float]:
        """What to add to the metrics of a step."""
        if self._first is None:
            self._first = metrics
        for rule in RULES:
            if rule.is_broken(metrics, self._first):
                self.count(rule.name, f"step {step}: {rule.meaning}")
        return {f"tripwire/{name}": float(count) for name, count in sorted(self.counts.items())}

    def count(self, name: str, message: str) -> None:
        """Note one more occurrence; only the first one is told."""
        self.counts[name] += 1
        if self.counts[name] == 1:
            logger.warning("%s: %s", name, message)

    def good_step(self) -> None:
        self.bad_steps_in_a_row = 0

    def bad_step(self, fault: Exception, step: int) -> None:
        """Count a step that was left out; too many in a row end the run."""
        self.bad_steps_in_a_row += 1
        self.count("non_finite", f"step {step} was left out: {fault}")
        if self.bad_steps_in_a_row >= MAX_BAD_STEPS_IN_A_ROW:
            raise TooManyBadSteps(
                f"{self.bad_steps_in_a_row} steps in a row were left out, the last one because "
                f"{fault}. The weights are those of the last good step; lower the learning rate, "
                "or look at the batches that were written out"
            ) from fault

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "bad_steps_in_a_row": self.bad_steps_in_a_row,
            "first": None if self._first is None else _numbers(self._first),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.bad_steps_in_a_row = int(state["bad_steps_in_a_row"])
        self._first = state["first"]


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}
