"""The value function: how much reward to expect from here, and learning that from returns."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.algos.aggregate import compute_value_loss
from verl.algos.sessions import sequence_tokens
from verl.config.critic import CriticConfig, FSDPCriticConfig
from verl.utils.device import without_waiting
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine, Columns, TrainResult
from verl.workers.mini_batch import (
    NUM_TOKENS,
    global_counts,
    merge_reports,
    plan_for_one_rank,
    summarise,
)
from verl.workers.schedule import MicroBatching, Passes, StepPlan, UpdatePlan


class DataParallelPPOCritic:
    """Values of response tokens, and updates of the model in `engine` towards the returns."""

    def __init__(self, config: CriticConfig, engine: BaseEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_values(self, data: TensorDict, *, passes: Passes | None = None) -> Tensor:
        """(B, T), the value before each response token was chosen; 0 where there is none.

        On several ranks `passes` are this rank's, of a plan for all of them.
        """
        config = self.config
        split = MicroBatching.of(
            by_tokens=config.use_dynamic_bsz,
            tokens=config.forward_max_token_len_per_gpu,
            rows=rows_per_pass(config),
            ranks_per_sequence=self.engine.ranks_per_sequence,
        )
        values = self.engine.infer_batch(data, micro_batching=passes or split)["values"]
        return values * without_waiting(data["response_mask"], values.device)

    def update_critic(
        self, data: TensorDict, *, rows_per_step: int, plan: UpdatePlan | None = None
    ) -> dict[str, Any]:
        """Go over the batch `ppo_epochs` times, one optimizer step per mini-batch.

        On several ranks `data` is this rank's chunk and `plan` says what is in each step, on all of
        them. A rank that is alone makes its own, with `rows_per_step` rows in a mini-batch.
        """
        config = self.config
        plan = plan or plan_for_one_rank(
            data,
            self.engine,
            rows_per_step=rows_per_step,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
            micro_batching=MicroBatching.of(
                by_tokens=config.use_dynamic_bsz,
                tokens=config.ppo_max_token_len_per_gpu,
                rows=config.ppo_micro_batch_size_per_gpu,
                ranks_per_sequence=self.engine.ranks_per_sequence,
            ),
        )
        results = [self._step(data, step) for step in plan.steps]
        self.engine.lr_scheduler_step()
        return summarise(results, "critic")

    def _step(self, data: TensorDict, step: StepPlan) -> tuple[TrainResult, dict[str, Metric]]:
        config, engine = self.config, self.engine
        counts = global_counts(step, data["response_mask"].shape[-1])

        def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            mask, values = rows["response_mask"], columns["values"]
            value_loss, clip_fraction = compute_value_loss(
                values,
                rows["returns"],
                rows["values"],
                mask,
                config.cliprange_value,
                config.loss_agg_mode,
                **counts,
                **sequence_tokens(rows),
            )
            return value_loss, {
                NUM_TOKENS: mask.sum(),
                "critic/vf_loss": value_loss.detach(),
                "critic/vf_clipfrac": clip_fraction,
                "critic/vpred_mean": (values.detach() * mask).sum() / mask.sum().clamp_min(1),
            }

        passes = step.passes[engine.get_data_parallel_rank()]
        result = engine.train_batch(data, loss, micro_batching=passes)
        return result, merge_reports(result.metrics, engine.get_data_parallel_group())


def rows_per_pass(config: CriticConfig) -> int | None:
    """Rows of a pass without gradients, where tokens do not limit it."""
    if isinstance(config, FSDPCriticConfig):
        return config.forward_micro_batch_size_per_gpu
    return config.ppo_infer_micro_batch_size_per_gpu or config.ppo_micro_batch_size_per_gpu
