"""The value function: how much reward to expect from here, and learning that from returns."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.algos.value_loss import compute_value_loss
from verl.config.critic import FSDPCriticConfig
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine, Columns, MicroBatching
from verl.workers.mini_batch import global_counts, merge_reports, mini_batches


class DataParallelPPOCritic:
    """Values of response tokens, and updates of the model in `engine` towards the returns."""

    def __init__(self, config: FSDPCriticConfig, engine: BaseEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_values(self, data: TensorDict) -> Tensor:
        """(B, T), the value before each response token was chosen; 0 where there is none."""
        config = self.config
        if config.use_dynamic_bsz:
            cut = MicroBatching(tokens=config.forward_max_token_len_per_gpu)
        else:
            cut = MicroBatching(rows=config.forward_micro_batch_size_per_gpu)
        values = self.engine.infer_batch(data, micro_batching=cut)["values"]
        return values * data["response_mask"]

    def update_critic(self, data: TensorDict, *, rows_per_step: int) -> dict[str, Any]:
        """Go over the batch `ppo_epochs` times, one optimizer step per mini-batch."""
        config = self.config
        seed = config.data_loader_seed if config.shuffle else None
        results, reports = [], []
        for rows in mini_batches(data, rows_per_step, epochs=config.ppo_epochs, shuffle_seed=seed):
            result, report = self._step(rows)
            results.append(result)
            reports.append(report)
        self.engine.lr_scheduler_step()
        merged = {
            name: Metric.merge([report[name] for report in reports if name in report])
            for name in reports[0]
        }
        losses = merged.pop("critic/vf_loss")
        return {
            **{name: metric.aggregate() for name, metric in merged.items()},
            "critic/vf_loss": sum(losses.values) / len(results),
            "critic/grad_norm": sum(result.grad_norm for result in results) / len(results),
            "critic/lr": results[-1].learning_rate,
            "critic/num_skipped_steps": sum(not result.is_applied for result in results),
        }

    def _step(self, mini_batch: TensorDict) -> tuple[Any, dict[str, Metric]]:
        config = self.config
        counts = global_counts(mini_batch["response_mask"], None)
        weights: list[float] = []

        def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, float]]:
            mask, values = rows["response_mask"], columns["values"]
            weights.append(float(mask.sum()))
            value_loss, clip_fraction = compute_value_loss(
                values,
                rows["returns"],
                rows["values"],
                mask,
                config.cliprange_value,
                config.loss_agg_mode,
                **counts,
            )
            mean = (values.detach() * mask).sum() / mask.sum().clamp_min(1)
            return value_loss, {
                "critic/vf_loss": float(value_loss.detach()),
                "critic/vf_clipfrac": float(clip_fraction),
                "critic/vpred_mean": float(mean),
            }

        if config.use_dynamic_bsz:
            cut = MicroBatching(tokens=config.ppo_max_token_len_per_gpu)
        else:
            cut = MicroBatching(rows=config.ppo_micro_batch_size_per_gpu)
        result = self.engine.train_batch(mini_batch, loss, micro_batching=cut)
        return result, merge_reports(result.metrics, weights)
