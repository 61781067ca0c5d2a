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
from statistics import fmean, pstdev
from typing import Any

import torch

from verl.algos.sessions import one_row_per_session
from verl.data_plane.batch import StoredBatch
from verl.protocol import DataProto
from verl.utils.environment import WentWrong

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]

MAX_LOG_PROB_ERROR = 0.05
"""Nats per token between the old log-probabilities and those at the start of the update."""

MAX_START_DISTANCE = 0.01
"""Nats per token between the policy and its reference before the first update."""

MAX_ABSTAINED_RATIO = 0.2
MAX_IDENTICAL_RATIO = 0.9
MAX_SCORE_SIGMAS = 5.0
NUM_RECENT_SCORES, MIN_RECENT_SCORES = 32, 8
"""Steps that the mean score of a step is compared with."""

MAX_DISAGREEMENT = 0.005
MIN_AUDITED, MIN_DISAGREEMENTS = 100, 2
"""Of the two graders: from when on their disagreement says something."""

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
        "grader_abstains",
        _above("abstained_ratio", MAX_ABSTAINED_RATIO),
        "the grader has no verdict on many responses, and these take no part in training; look at "
        "what it can read (docs/graders.md) and at the gold answers",
    ),
    Rule(
        "identical_responses",
        _above("identical_ratio", MAX_IDENTICAL_RATIO),
        "nearly all responses are the same text, whatever the prompt says",
    ),
    Rule(
        "reward_jump",
        _above("score_sigmas", MAX_SCORE_SIGMAS),
        "the mean score is more than five standard deviations away from that of recent steps; the "
        "policy may have found a gap in the reward function, or the grader works differently now",
    ),
    Rule(
        "graders_disagree",
        _above("disagreement", MAX_DISAGREEMENT),
        "math-verify, which looks at some of the scored responses, comes to another verdict more "
        "often than it should; the log names the answers (reward_model.audit_ratio)",
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


SIGNALS = "tripwire_signals"
"""In `meta_info` of a stored batch: its signals, which a rank has computed."""


def signals_of(batch: DataProto | StoredBatch, metrics: Metrics) -> dict[str, float]:
    """Numbers that only rules need: the level of scores, sameness of responses, abstentions."""
    if isinstance(batch, StoredBatch):
        return batch.meta_info[SIGNALS]
    ends = one_row_per_session(batch)
    scores = ends.batch["token_level_scores"].sum(-1).double()
    mask = ends.batch["response_mask"].bool()
    texts = Counter(
        tokens[kept].numpy().tobytes()
        for tokens, kept in zip(ends.batch["responses"], mask, strict=True)
    )
    num_abstained = metrics.get("reward/num_abstained", 0.0)
    return {
        "score_mean": scores.mean().item(),
        "score_error": (scores.var(correction=0) / len(scores)).sqrt().item(),
        "identical_ratio": texts.most_common(1)[0][1] / len(ends) if len(ends) > 7 else 0.0,
        "abstained_ratio": num_abstained / (num_abstained + len(ends)),
    }


class Tripwires:
    """Counts of broken rules over a run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self.bad_steps_in_a_row = 0
        self._first: Metrics | None = None
        self._recent_scores: list[float] = []
        self._num_audited = self._num_disagreements = 0.0

    def check(
        self, metrics: Metrics, step: int, batch: DataProto | StoredBatch | None = None
    ) -> dict[str, float]:
        """What to add to the metrics of a step, which trained on `batch`."""
        signals = {} if batch is None else signals_of(batch, metrics)
        now = {**self._compared(signals, metrics), **signals, **metrics}
        if self._first is None:
            self._first = now
        for rule in RULES:
            if rule.is_broken(now, self._first):
                self.count(rule.name, rule.meaning, at=f"step {step}: ")
        return {f"tripwire/{name}": float(count) for name, count in sorted(self.counts.items())}

    def _compared(self, signals: Metrics, metrics: Metrics) -> dict[str, float]:
        """What can be told from this step together with the earlier ones."""
        found = {}
        if signals:
            recent, score = self._recent_scores, signals["score_mean"]
            if len(recent) >= MIN_RECENT_SCORES:
                sigma = math.hypot(pstdev(recent), signals["score_error"])
                found["score_sigmas"] = abs(score - fmean(recent)) / max(sigma, 1e-6)
            self._recent_scores = [*recent, score][-NUM_RECENT_SCORES:]
        self._num_audited += metrics.get("reward/num_audited", 0.0)
        self._num_disagreements += metrics.get("reward/num_audit_disagreements", 0.0)
        if self._num_audited >= MIN_AUDITED and self._num_disagreements >= MIN_DISAGREEMENTS:
            found["disagreement"] = self._num_disagreements / self._num_audited
        return found

    def count(self, name: str, message: str, at: str = "") -> None:
        """Note one more occurrence; only the first one is logged."""
        self.counts[name] += 1
        self._messages[name] = message
        if self.counts[name] == 1:
            logger.warning("%s: %s%s", name, at, message)

    def take_messages(self) -> dict[str, str]:
        """What was counted since the last call, by name."""
        messages, self._messages = self._messages, {}
        return messages

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
            "recent_scores": self._recent_scores,
            "audited": [self._num_audited, self._num_disagreements],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.bad_steps_in_a_row = int(state["bad_steps_in_a_row"])
        self._first = state["first"]
        self._recent_scores = list(state.get("recent_scores", []))
        self._num_audited, self._num_disagreements = state.get("audited", (0.0, 0.0))


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}
