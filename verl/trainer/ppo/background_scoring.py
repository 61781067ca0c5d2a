"""Scores that are found while log-probabilities are computed (`launch_reward_fn_async`).

    trainer's thread                           scoring thread
      score: start  ------------------------>   score_batch on a view of the batch
      annotate: models run                       ...
      assign_credit: take the scores  <------   rows that stay, their scores and reports

The two share the tensors and change none of them; each adds columns to a batch of its own. Rows are
matched by number, for `annotate` may reorder them and scoring may set some aside.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.reward import RewardError
from verl.trainer.ppo.scoring import Scored, score_batch
from verl.workers.reward_manager.guarded_call import outcome_of

ROW_COLUMN = "__row__"
MAX_SECONDS = 3600.0
"""Reward functions have deadlines; this one is for a reward manager that has none."""


class BackgroundScores:
    """Starts to score `batch` when made; the batch gets a column that numbers its rows."""

    def __init__(self, batch: DataProto, reward_fn: Callable[..., Any]) -> None:
        batch.non_tensor_batch[ROW_COLUMN] = np.arange(len(batch))
        view = DataProto(
            batch=batch.batch.copy(),
            non_tensor_batch=dict(batch.non_tensor_batch),
            meta_info=dict(batch.meta_info),
        )
        self._outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: self._outcome.put(outcome_of(lambda: score_batch(view, reward_fn))),
            daemon=True,
            name="scoring",
        ).start()

    def found(self, timeout_seconds: float = MAX_SECONDS) -> Scored:
        """The scores; an error while they were found is raised here."""
        try:
            scored, error = self._outcome.get(timeout=timeout_seconds)
        except queue.Empty:
            raise RewardError(
                f"the reward manager has not answered for {timeout_seconds} s; it runs in the "
                "background because reward_model.launch_reward_fn_async is on"
            ) from None
        if error is not None:
            raise error
        return scored


def join_scores(batch: DataProto, scored: Scored) -> DataProto:
    """The rows of `batch` that were scored, with their scores and what was reported."""
    found = scored.batch
    place_of = {number: place for place, number in enumerate(found.non_tensor_batch[ROW_COLUMN])}
    numbers = batch.non_tensor_batch.pop(ROW_COLUMN)
    rows = [row for row, number in enumerate(numbers) if number in place_of]
    places = [place_of[numbers[row]] for row in rows]
    if len(rows) < len(batch):
        batch = batch.select_idxs(rows)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    batch.batch["token_level_scores"] = found.batch["token_level_scores"][places]
    for name in found.meta_info["reward_extra_keys"]:
        batch.non_tensor_batch[name] = found.non_tensor_batch[name][places]
    batch.meta_info["reward_extra_keys"] = found.meta_info["reward_extra_keys"]
    return batch
