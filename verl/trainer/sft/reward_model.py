"""Training of reward models on pairs: the loop of fine-tuning with another loss.

    bradley_terry   L = - mean log sigmoid(s(chosen) - s(rejected))     s: a head at the last token
    implicit        L = mean BCE(sigmoid(s), is chosen)                 s: beta sum of log-ratios

The implicit model (arXiv:2412.01981) is a language model, and its score of a response is how much
more likely that is than under a frozen reference. A batch has the rows chosen 0, rejected 0, chosen
1, ..., and both rows of a pair run in one pass. Losses are divided by the pairs of the whole step,
so the gradient depends neither on micro-batches nor on ranks.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from verl.algos.prime import implicit_loss, implicit_rewards
from verl.config.rm import RMConfig
from verl.models.loading import load_scoring_model
from verl.trainer.sft.batches import Row, lay_out
from verl.trainer.sft.settings import build_engine, load_model
from verl.trainer.sft.trainer import Metrics, SFTTrainer, StepCounts
from verl.utils.dataset.tables import DataError
from verl.workers.engine.base import Columns, TrainResult
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.stepping import SteppingEngine
from verl.workers.reward_model.scores import as_rows
from verl.workers.schedule import Passes

REFERENCE = "ref_log_probs"
IS_CHOSEN = "is_chosen"


class RMTrainer(SFTTrainer):
    """Trains one reward model on one dataset of pairs."""

    config: RMConfig

    @property
    def is_implicit(self) -> bool:
        return self.config.objective.name == "implicit"

    def load_engine(self) -> SteppingEngine:
        total = self.total_steps
        if self.is_implicit:
            return build_engine(self.settings, self.ranks, total_steps=total)
        engine = build_engine(
            self.settings,
            self.ranks,
            total_steps=total,
            load=load_scoring_model,
            is_value_model=True,
        )
        config = engine.module.config
        if config.pad_token_id is None:  # without it, transformers scores one text at a time
            config.pad_token_id = self.tokenizer.pad_token_id
        return engine

    @cached_property
    def reference(self) -> OneDeviceEngine:
        """The frozen model of the implicit objective, whole on every rank."""
        path = self.config.objective.ref_path
        engine = OneDeviceEngine(partial(load_model, self.settings, path=path))
        engine.initialize()
        return engine

    def read_rows(self, dataset: Dataset[Row], indices: Sequence[int]) -> TensorDict:
        """Both rows of each pair, one after the other."""
        pairs = [dataset[index] for index in indices]
        sides = [{name: pair[name][side] for name in pair} for pair in pairs for side in (0, 1)]
        if self.is_implicit:
            batch = lay_out(sides)
        else:
            tokens = [side["input_ids"][side["attention_mask"].bool()].tolist() for side in sides]
            batch = as_rows(tokens)
            batch["response_mask"] = torch.ones_like(batch["responses"])
        batch[IS_CHOSEN] = torch.tensor([1.0, 0.0] * len(pairs))
        return batch

    def optimize(self, batch: TensorDict, counts: StepCounts) -> tuple[TrainResult, Metrics]:
        batch, num_pairs = self._with_reference(batch), self.settings.data.train_batch_size

        def loss(columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            scores = self.scores(columns, rows)
            value = self.loss_sum(columns, rows, scores) / num_pairs
            return value, pair_counts(scores.detach())

        result = self.engine.train_batch(batch, loss, micro_batching=self._passes(batch))
        sums = {
            name: float(sum(report[name] for report in result.metrics))
            for name in ("right", "margin")
        }
        right, margin = self.ranks.total(sums["right"], sums["margin"])
        return result, {"train/accuracy": right / num_pairs, "train/margin": margin / num_pairs}

    def validate(self, dataset: Dataset[Row]) -> Metrics:
        """Loss, accuracy (an equal score is half right) and mean margin of held-out pairs."""
        totals = torch.zeros(4, dtype=torch.float64)
        for batch in self.held_out_batches(dataset):
            rows = self._with_reference(batch)
            columns = self.engine.infer_batch(rows, micro_batching=self._passes(rows))
            columns = {name: column.double().cpu() for name, column in columns.items()}
            scores = self.scores(columns, rows)
            found = pair_counts(scores)
            parts = (self.loss_sum(columns, rows, scores), found["right"], found["margin"])
            totals += torch.tensor([*map(float, parts), len(rows) // 2], dtype=torch.float64)
        loss, right, margin, count = self.ranks.total(*totals.tolist())
        if count == 0:
            raise DataError("data.val_files has no pairs")
        names = ("val/loss", "val/accuracy", "val/margin")
        return {name: v / count for name, v in zip(names, (loss, right, margin), strict=True)}

    def scores(self, columns: Columns, rows: TensorDict) -> Tensor:
        """(2P,), the score of each response."""
        if not self.is_implicit:
            return columns["values"][:, 0]
        beta = self.config.objective.beta_train
        log_probs = columns["log_probs"]
        reference = rows[REFERENCE].to(log_probs)
        return implicit_rewards(log_probs, reference, rows["response_mask"], beta=beta).sum(-1)

    def loss_sum(self, columns: Columns, rows: TensorDict, scores: Tensor) -> Tensor:
        """The loss, summed over pairs; an implicit pair has the mean of its two losses."""
        if not self.is_implicit:
            return bradley_terry_loss(scores)
        log_probs = columns["log_probs"]
        return implicit_loss(
            log_probs,
            rows[REFERENCE].to(log_probs),
            rows["response_mask"],
            rows[IS_CHOSEN],
            beta=self.config.objective.beta_train,
            num_sequences=2,
        )

    def _with_reference(self, batch: TensorDict) -> TensorDict:
        if not self.is_implicit:
            return batch
        columns = self.reference.infer_batch(batch, micro_batching=self._passes(batch))
        return batch.copy().update({REFERENCE: columns["log_probs"].cpu()})

    def _passes(self, batch: TensorDict) -> Passes:
        """Rows of whole pairs."""
        size = 2 * cast(int, self.settings.micro_batching.rows)
        starts = range(0, len(batch), size)
        return [list(range(start, min(start + size, len(batch)))) for start in starts]


def bradley_terry_loss(scores: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected), summed over the pairs of interleaved scores."""
    return -F.logsigmoid(scores[0::2] - scores[1::2]).sum()


def pair_counts(scores: Tensor) -> dict[str, Tensor]:
    """Sums over the pairs of interleaved scores: how many are right, and the margins."""
    margins = scores[0::2] - scores[1::2]
    is_right = (margins > 0).to(margins) + 0.5 * (margins == 0).to(margins)
    return {"right": is_right.sum(), "margin": margins.sum()}
