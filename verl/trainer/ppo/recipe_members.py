"""Members of the trainer that recipes with a loop of their own call, under the names they know."""

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.validation import dump_batch, dump_generations
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tracking import ValidationGenerationsLogger


class RecipeMembers:
    """What these methods read is set by the trainer."""

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
