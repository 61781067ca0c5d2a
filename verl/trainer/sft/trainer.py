"""The loop of supervised fine-tuning: rows in, weights and metrics out.

    loss = - sum of log p(trained token) / number of trained tokens in the global batch

The count is taken over the whole batch, on all ranks, before it is split, so the gradient depends
neither on the size of micro-batches nor on the number of ranks. Every rank runs this same loop on
its share of the rows; rank 0 also reports and writes checkpoints.

`SFTWorker` is a rank that a controller drives, one call per step:

    driver   start          advance   advance   ...   finish
    rank 0   build, meet    step 1    step 2          the summary for the user
    rank 1   build, meet    step 1    step 2

Each call has the controller's deadline, so a rank that dies or hangs ends the run; inside a call
ranks talk to each other as they do under `torchrun`.

Speed is counted over all tokens of the step's rows, on all ranks. MFU is the fraction of the
devices' published bf16 peak that the arithmetic of a full training step comes to; where no peak is
published (a CPU), or where most of that arithmetic is saved (LoRA), it is left out.
"""

import logging
import math
from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from verl.config.convert import to_dict
from verl.config.load import load_config
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.common import RunProgress, Termination
from verl.trainer.sft.batches import Ranks, Row, RowReader, load_rows, reads_in_order, rows_of_step
from verl.trainer.sft.checkpoint import SFTCheckpoints, run_locks
from verl.trainer.sft.launch import SILENT_RANK_SECONDS, ending
from verl.trainer.sft.settings import (
    AnySFTConfig,
    SFTSettings,
    build_datasets,
    build_engine,
    build_tokenizer,
    ranks_per_sequence,
    settings_of,
    steps_between,
)
from verl.utils.checkpoint.layout import CheckpointSaveError, holding, note_phase
from verl.utils.dataset.tables import DataError
from verl.utils.device import collecting_seldom, seed_everything
from verl.utils.distributed import (
    destroy_global_process_group,
    initialize_global_process_group_ray,
)
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.profiler import DistProfiler
from verl.utils.tracking import Tracking
from verl.workers.engine.base import Columns, TrainResult
from verl.workers.engine.routes import AUX_LOSS
from verl.workers.engine.stepping import SteppingEngine

logger = logging.getLogger(__name__)


def total_steps(settings: SFTSettings, per_epoch: int) -> int:
    """Optimizer steps of the run."""
    if settings.trainer.total_training_steps is not None:
        return settings.trainer.total_training_steps
    return settings.trainer.total_epochs * per_epoch


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


class SFTTrainer:
    """Fine-tunes one model on one dataset; `fit` is the whole run.

    Under several ranks the process group must exist already, and the ranks are its: meshes, which
    programs of older scripts pass, say nothing more.
    """

    def __init__(
        self,
        config: AnySFTConfig | DictConfig,
        device_mesh: Any = None,
        ulysses_device_mesh: Any = None,
        tokenizer: Any = None,
        train_dataset: Dataset[Row] | None = None,
        val_dataset: Dataset[Row] | None = None,
    ) -> None:
        if isinstance(config, DictConfig):
            config = cast(SFTConfig, load_config(config, SFTConfig, keeps_unknown=True).checked())
        self.config = config
        self.settings = settings = settings_of(config)
        self.ranks = Ranks.here(ranks_per_sequence(config))
        seed_everything(settings.trainer.seed)
        self.tokenizer = tokenizer or build_tokenizer(settings)
        if train_dataset is None:
            train_dataset, val_dataset = build_datasets(settings, self.tokenizer)
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.num_rows = len(cast(Sized, self.train_dataset))
        self.steps_per_epoch = steps_per_epoch(settings, self.num_rows)
        self.total_steps = total_steps(settings, self.steps_per_epoch)
        self.engine = self.load_engine()
        self.flops = None if settings.lora else FlopsCounter(self.engine.module.config)
        self.checkpoints = SFTCheckpoints(
            config, settings, self.engine, self.tokenizer, self.ranks, num_rows=self.num_rows
        )
        self.profiler = DistProfiler(self.ranks.rank, settings.profiler)
        self.num_tokens = 0
        self._reader = RowReader()
        self.summary = RunSummary(total_steps=self.total_steps)

    def fit(self) -> None:
        """Train to the last step. Ctrl-C and SIGTERM end the run after the current one, saved."""
        with Termination() as termination:
            for _ in self.steps(termination):
                pass

    def steps(self, termination: Termination | None = None) -> Iterator[int]:
        """Make one step after the other, giving each one's number; validate and save when due."""
        with ExitStack() as stack:
            if self.ranks.is_first:
                stack.enter_context(holding(run_locks(self.settings.trainer)))
            first, self.num_tokens = self.checkpoints.resume()
            self.summary.first_step = self.summary.last_step = first
            tracking, progress = self._reporting(stack)
            stack.enter_context(collecting_seldom())
            stack.callback(self.profiler.stop)
            stack.callback(self._reader.close)
            for step in range(first + 1, self.total_steps + 1):
                note_phase(f"step {step}")
                self._profile(step)
                metrics = self.train_step(step)
                is_asked = termination is not None and termination.is_requested
                is_last = step == self.total_steps or self.ranks.agree(is_asked)
                if self.val_dataset is not None and self._is_due("test_freq", step, is_last):
                    metrics |= self.validate(self.val_dataset)
                refusal = None
                if self._is_due("save_freq", step, is_last):
                    refusal = self._save_if_possible(step, is_last)
                self.summary.add(step, metrics)
                if tracking is not None:
                    tracking.log(metrics, step)
                if progress is not None:
                    progress.show(step)
                if refusal is not None and is_last:  # nothing will be saved after it
                    raise refusal
                yield step
                if is_last:
                    return

    def load_engine(self) -> SteppingEngine:
        """The model with its optimizer."""
        return build_engine(self.settings, self.ranks, total_steps=self.total_steps)

    def read_rows(self, dataset: Dataset[Row], indices: Sequence[int]) -> TensorDict:
        """Rows of a dataset, ready for the engine."""
        return load_rows(dataset, indices)

    def optimize(self, batch: TensorDict, counts: StepCounts) -> tuple[TrainResult, Metrics]:
        """One optimizer step on this rank's rows, and what the loss reports beside itself."""

        def loss(columns: Columns, part: TensorDict) -> tuple[Tensor, dict[str, Any]]:
            mask = part["response_mask"].to(columns["log_probs"].device)
            nll = -(columns["log_probs"] * mask).sum() / counts.num_trained_tokens
            if AUX_LOSS in columns:
                num_rows = self.settings.data.train_batch_size
                share = columns[AUX_LOSS].sum() / num_rows
                return nll + self.engine.routes.aux_loss_coef * share, {}
            return nll, {}

        micro_batching = self.settings.micro_batching
        return self.engine.train_batch(batch, loss, micro_batching=micro_batching), {}

    def validate(self, dataset: Dataset[Row]) -> Metrics:
        """What is reported about held-out rows."""
        return {"val/loss": self.mean_loss(dataset)}

    @DistProfiler.annotate(role="train_step")
    def train_step(self, step: int) -> Metrics:
        """One optimizer step; steps count from 1."""
        start = perf_counter()
        batch, counts = self._batch(step)
        result, reported = self.optimize(batch, counts)
        self.engine.lr_scheduler_step()
        self.num_tokens += counts.num_tokens
        if not result.is_applied:
            self.summary.num_skipped += 1
            logger.warning("step %d changed nothing: its gradient is not finite", step)
        return reported | step_metrics(
            result,
            counts,
            seconds=perf_counter() - start,
            num_tokens_so_far=self.num_tokens,
            peak_flops=self.ranks.size * get_device_flops(""),
        )

    def mean_loss(self, dataset: Dataset[Row]) -> float:
        """-log p per trained token, over all rows, on all ranks."""
        total, num_tokens = 0.0, 0
        for batch in self.held_out_batches(dataset):
            columns = self.engine.infer_batch(batch, micro_batching=self.settings.micro_batching)
            log_probs = columns["log_probs"].double()
            mask = batch["response_mask"].to(log_probs.device)
            total -= float((log_probs * mask).sum())
            num_tokens += int(mask.sum())
        total, count = self.ranks.total(total, num_tokens)
        if count == 0:
            raise DataError("no row of data.val_files has a token to train on")
        return total / count

    def held_out_batches(self, dataset: Dataset[Row]) -> Iterator[TensorDict]:
        """This rank's rows of a dataset, from the first to the last."""
        mine = self.ranks.share(range(len(cast(Sized, dataset))))
        read = partial(self.read_rows, dataset)
        yield from self._reader.each(
            reads_in_order(read, mine, self.settings.data.train_batch_size)
        )

    def _batch(self, step: int) -> tuple[TensorDict, StepCounts]:
        """This rank's rows, and counts over the rows of all ranks."""
        batch = self._reader.take(step, self._read, last=self.total_steps)
        lengths = batch["attention_mask"].sum(1).tolist()
        flops = math.nan if self.flops is None else self.flops.step_flops(lengths)
        trained, tokens, flops = self.ranks.total(
            float(batch["response_mask"].sum()), float(sum(lengths)), flops
        )
        if trained == 0:
            raise DataError(
                f"step {step}: none of its {self.settings.data.train_batch_size} rows has a token "
                "to train on; data.truncation cut every response away: raise data.max_length"
            )
        return batch, StepCounts(
            num_trained_tokens=int(trained), num_tokens=int(tokens), flops=flops
        )

    def _read(self, step: int) -> TensorDict:
        rows = rows_of_step(
            step - 1,
            num_rows=self.num_rows,
            batch_size=self.settings.data.train_batch_size,
            seed=self.settings.trainer.seed,
        )
        return self.read_rows(self.train_dataset, self.ranks.share(rows))

    def _reporting(self, stack: ExitStack) -> tuple[Tracking | None, RunProgress | None]:
        """Rank 0 speaks for all."""
        if not self.ranks.is_first:
            return None, None
        trainer = self.settings.trainer
        tracking = Tracking(
            trainer.project_name, trainer.experiment_name, trainer.logger, to_dict(self.config)
        )
        stack.enter_context(tracking)
        return tracking, stack.enter_context(RunProgress(self.total_steps))

    def _is_due(self, option: str, step: int, is_last: bool) -> bool:
        frequency = steps_between(self.settings.trainer[option], self.steps_per_epoch)
        return is_last or (frequency > 0 and step % frequency == 0)

    def _save_if_possible(self, step: int, is_last: bool) -> CheckpointSaveError | None:
        """What the disk refuses is logged and returned: the earlier checkpoints are as they were,
        and the run can go on."""
        try:
            self.checkpoints.save(step, num_tokens=self.num_tokens, is_last=is_last)
        except CheckpointSaveError as error:
            logger.warning("%s", error)
            self.ranks.meet()
            return error
        return None

    def _profile(self, step: int) -> None:
        first, last = self.settings.profile_interval
        if step == first:
            self.profiler.start("sft", step)
        elif step == last + 1:
            self.profiler.stop()


def steps_per_epoch(settings: SFTSettings, num_rows: int) -> int:
    batch_size = settings.data.train_batch_size
    if num_rows < batch_size:
        raise DataError(
            f"data.train_batch_size is {batch_size}, but data.train_files has {num_rows} rows; "
            f"set it to {num_rows} or less"
        )
    return num_rows // batch_size


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
    val_accuracy: float = math.nan
    """Of a reward model."""

    last_mfu: float = math.nan
    num_skipped: int = 0

    def add(self, step: int, metrics: Metrics) -> None:
        if math.isnan(self.first_loss):
            self.first_loss = metrics["train/loss"]
        self.last_step, self.last_loss = step, metrics["train/loss"]
        self.num_tokens += int(metrics["train/global_tokens"])
        self.seconds += metrics["train/time(s)"]
        self.val_loss = metrics.get("val/loss", self.val_loss)
        self.val_accuracy = metrics.get("val/accuracy", self.val_accuracy)
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
        if not math.isnan(self.val_accuracy):
            lines["accuracy"] = f"{self.val_accuracy:.1%} on held-out pairs"
        if self.first_step:
            lines["steps"] += f", {self.first_step} of them before this start"
        if self.num_skipped:
            lines["skipped"] = f"{self.num_skipped} steps whose gradients were not finite"
        return "\n".join(f"{name:9}{value}" for name, value in lines.items())


class SFTWorker(Worker):
    """One rank; `config` is the plain dictionary of an `SFTEngineConfig`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config: SFTEngineConfig = load_config(config, SFTEngineConfig).checked()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self) -> int:
        """Meet the other ranks, load the model; the number of steps of the run."""
        if self.world_size > 1:
            initialize_global_process_group_ray(SILENT_RANK_SECONDS)
        self.trainer = SFTTrainer(self.config)
        self._termination = Termination()
        self._steps = self.trainer.steps(self._termination)
        return self.trainer.total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def advance(self, is_last: bool = False) -> int | None:
        """Make a step and give its number; None after the last, or after one that shall be."""
        self._termination.is_requested = is_last
        return next(self._steps, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish(self) -> str:
        """Leave the other ranks; a text on how the run went."""
        destroy_global_process_group()
        return ending(self.trainer)
