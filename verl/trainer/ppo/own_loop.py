"""Recipes with a loop of their own: the members of the trainer that they call, and their record.

    its fit:  update_actor(batch)   logger.log(metrics, step)
                       |                        |
                       +---> OwnLoopRecord <----+ ---> RunBoard: run page, /metrics

Such a loop tells us neither when a step ends nor what it trained on. A step ends where it logs
with a `Tracking` of the run's project and experiment; its batches are those that the actor was
given since the step before. A `fit` that calls ours inside is recorded by ours.
"""

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np

from verl.board.live import RunBoard
from verl.board.recorder import REQUIRED_ARRAYS, REQUIRED_TENSORS
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.common import StageClock
from verl.trainer.ppo.validation import dump_batch, dump_generations
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tracking import TrackingBackend, ValidationGenerationsLogger, listening


class RecipeMembers:
    """Members under the names that recipes know; what they read is set by the trainer."""

    config: PPOConfig
    tokenizer: Any
    global_steps: int
    validation_generations_logger: ValidationGenerationsLogger
    actor_rollout_wg: Any

    def _balance_batch(
        self,
        batch: DataProto,
        metrics: MutableMapping[str, Any],
        logging_prefix: str = "global_seqlen",
    ) -> None:
        """Report how evenly tokens are spread over ranks; the rows stay in their order.

        Rows are shared out by tokens where they are dealt to ranks (`verl.workers.roles.dispatch`),
        so neither the rows of an optimizer step nor their order depends on the number of ranks.
        """
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        num_ranks = min(self.actor_rollout_wg.world_size, len(lengths))
        parts = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=False)
        metrics.update(log_seqlen_unbalance(lengths, parts, logging_prefix))

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The columns that a manager of agent loops sees."""
        return DataProto(non_tensor_batch=dict(batch.non_tensor_batch))

    def _start_profiling(self, do_profile: bool) -> None:
        """Let the policy's ranks record this step, if the actor's profiler is enabled."""
        if do_profile:
            self.actor_rollout_wg.start_profile(role="step", profile_step=self.global_steps)

    def _stop_profiling(self, do_profile: bool) -> None:
        if do_profile:
            self.actor_rollout_wg.stop_profile()

    def _log_rollout_data(
        self,
        batch: DataProto,
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        timing_raw: MutableMapping[str, float],
        rollout_data_dir: str,
    ) -> None:
        """Write the responses of a step; what was reported beside scores is in the batch too."""
        with marked_timer("dump_rollout_generations", timing_raw):
            dump_batch(batch, rollout_data_dir, self.global_steps, self.tokenizer)

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Sequence[Any],
        scores: Sequence[float],
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        dump_path: str | Path,
    ) -> None:
        dump_generations(
            dump_path,
            self.global_steps,
            inputs=inputs,
            outputs=outputs,
            gts=gts,
            scores=scores,
            reward_extra_infos=reward_extra_infos_dict,
        )

    def _maybe_log_val_generations(
        self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[Any]
    ) -> None:
        """Show some samples in the trackers: `trainer.log_val_generations` of them."""
        count = self.config.trainer.log_val_generations
        if count:
            table = sample_table(inputs, outputs, scores)[:count]
            loggers = self.config.trainer.logger
            self.validation_generations_logger.log(loggers, table, self.global_steps)


def sample_table(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[Any]
) -> list[tuple[str, str, Any]]:
    """The samples in an order that is the same each time and does not favour any."""
    rows = sorted(zip(inputs, outputs, scores, strict=True), key=lambda row: row[0])
    order = np.random.RandomState(42).permutation(len(rows))
    return [rows[place] for place in order]


logger = logging.getLogger(__name__)

TIMING = "timing_s/"


class OwnLoopRecord(TrackingBackend):
    """Listens to the trackers of a run while its `fit` runs."""

    def __init__(self, board: RunBoard, project_name: str, experiment_name: str) -> None:
        super().__init__(project_name, experiment_name)
        self._board = board
        self._stack, self._name = ExitStack(), ""
        self._has_opened = False
        self._clock = StageClock()
        self._batches: list[DataProto] = []
        self._has_samples = False
        self._last: tuple[int, dict[str, Any], dict[str, float]] = (-1, {}, {})

    def run(self, fit: MethodType) -> None:
        self._name = f"{fit.__module__}.{fit.__qualname__}"
        with self._stack, listening(self):
            fit()
        if not self._has_samples and (self._has_opened or not self._board.was_opened):
            seen = "metrics alone are" if self._has_opened else "nothing is"
            logger.warning(
                "%s recorded of this run: its trainer has a fit of its own, which is followed "
                "through Tracking(%r, %r).log and actor_rollout_wg.update_actor(DataProto)",
                *(seen, self.project_name, self.experiment_name),
            )

    def observed(self, update_actor: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, whose batches are kept until the step is logged."""

        def update(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(batch, DataProto) and is_complete(batch):
                tensors, arrays = list(batch.batch.keys()), list(batch.non_tensor_batch)
                self._batches.append(batch.select(tensors, arrays))
            return update_actor(batch, *args, **kwargs)

        return update

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if not self._has_opened:
            if self._board.was_opened:  # by our loop, which runs inside this one
                return
            self._board.foreign_loop = self._name
            self._stack.enter_context(self._board)
            self._has_opened = True
        batches, self._batches = self._batches, []
        timing = {
            name.removeprefix(TIMING): value
            for name, value in data.items()
            if name.startswith(TIMING)
        }
        seconds, metrics = self._clock.shares(timing), dict(data)
        if step == self._last[0]:  # validation may be logged apart
            _, before, spent = self._last
            metrics = {**before, **metrics}
            seconds = {
                name: seconds.get(name, 0.0) + spent.get(name, 0.0) for name in {**spent, **seconds}
            }
        self._last = (step, metrics, seconds)
        self._has_samples |= bool(batches)
        batch = DataProto.concat(batches) if batches else None
        self._board.add_step(step, metrics, seconds, batch=batch)


def is_complete(batch: DataProto) -> bool:
    """Whether the batch has what a sample of the store is made of."""
    has_tensors = set(batch.batch.keys()) >= REQUIRED_TENSORS
    return has_tensors and set(batch.non_tensor_batch) >= REQUIRED_ARRAYS
