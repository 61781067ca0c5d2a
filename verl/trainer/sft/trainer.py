"""The loop of supervised fine-tuning: rows in, weights out.

    loss = - sum of log p(trained token) / number of trained tokens in the global batch

The count is taken over the whole batch before it is cut, so the gradient does not depend on
`micro_batch_size_per_gpu`. Runs in one process on one device.
"""

import sys
from time import perf_counter
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from verl.config.convert import to_dict
from verl.config.sft import SFTConfig
from verl.trainer.sft.batches import Row, batches_in_order, load_rows, rows_of_step
from verl.trainer.sft.building import build_datasets, build_engine, build_tokenizer
from verl.trainer.sft.checkpoint import SFTCheckpoints
from verl.utils.dataset.tables import DataError
from verl.utils.tracking import Tracking
from verl.workers.engine.base import Columns, MicroBatching

Metrics = dict[str, float]


class SFTTrainer:
    """Fine-tunes one model on one dataset; `fit` is the whole run."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        self.tokenizer = build_tokenizer(config)
        self.train_dataset, self.val_dataset = build_datasets(config, self.tokenizer)
        self.num_rows = len(self.train_dataset)  # pyright: ignore[reportArgumentType]
        self.total_steps = total_steps(config, self.num_rows)
        self.engine = build_engine(config, total_steps=self.total_steps)
        self.checkpoints = SFTCheckpoints(
            config, self.engine, self.tokenizer, num_rows=self.num_rows
        )
        self.micro_batching = MicroBatching(rows=config.data.micro_batch_size_per_gpu)

    def fit(self) -> None:
        """Train until the last step; validate and save as often as the configuration says."""
        trainer = self.config.trainer
        first = self.checkpoints.resume()
        tracking = Tracking(
            trainer.project_name, trainer.experiment_name, trainer.logger, to_dict(self.config)
        )
        bar = tqdm(
            total=self.total_steps,
            initial=first,
            desc="sft",
            disable=not sys.stderr.isatty(),
        )
        with tracking, bar:
            for step in range(first + 1, self.total_steps + 1):
                metrics = self.train_step(step)
                if self._is_due(step, trainer.test_freq) and self.val_dataset is not None:
                    metrics["val/loss"] = self.mean_loss(self.val_dataset)
                if self._is_due(step, trainer.save_freq):
                    self.checkpoints.save(step)
                tracking.log(metrics, step)
                bar.set_postfix(loss=f"{metrics['train/loss']:.3f}", refresh=False)
                bar.update()

    def train_step(self, step: int) -> Metrics:
        """One optimizer step; steps count from 1."""
        start = perf_counter()
        rows = rows_of_step(
            step - 1,
            num_rows=self.num_rows,
            batch_size=self.config.data.train_batch_size,
            seed=self.config.trainer.seed,
        )
        batch = load_rows(self.train_dataset, rows)
        num_tokens = int(batch["response_mask"].sum())
        if num_tokens == 0:
            raise DataError(
                f"step {step}: none of its {len(rows)} rows has a token to train on; "
                "data.truncation cut every response away: raise data.max_length"
            )

        def loss(columns: Columns, part: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            return -(columns["log_probs"] * part["response_mask"]).sum() / num_tokens, {}

        result = self.engine.train_batch(batch, loss, micro_batching=self.micro_batching)
        self.engine.lr_scheduler_step()
        return {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr(1e-3)": result.learning_rate * 1e3,
            "train/time(s)": perf_counter() - start,
        }

    def mean_loss(self, dataset: Dataset[Row]) -> float:
        """-log p per trained token, over all rows."""
        total, num_tokens = 0.0, 0
        for batch in batches_in_order(dataset, self.config.data.train_batch_size):
            log_probs = self.engine.infer_batch(batch, micro_batching=self.micro_batching)
            mask = batch["response_mask"].to(log_probs["log_probs"].device)
            total -= float((log_probs["log_probs"] * mask).sum())
            num_tokens += int(mask.sum())
        return total / max(1, num_tokens)

    def _is_due(self, step: int, frequency: int) -> bool:
        is_last = step == self.total_steps
        return is_last or (frequency > 0 and step % frequency == 0)


def total_steps(config: SFTConfig, num_rows: int) -> int:
    """Optimizer steps of the run."""
    batch_size = config.data.train_batch_size
    if num_rows < batch_size:
        raise DataError(
            f"data.train_batch_size is {batch_size}, but data.train_files has {num_rows} rows; "
            f"set it to {num_rows} or less"
        )
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * (num_rows // batch_size)
