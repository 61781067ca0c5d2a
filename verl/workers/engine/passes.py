"""How rows are split into micro-batches, and what happens to one that does not fit into memory.

    micro-batch of 8 rows      backward runs out of memory; parameters 7 to 9 have their gradient
      first 4, then last 4     with parameters 7 to 9 frozen: 0 to 6 get theirs from the halves

A backward pass adds to each parameter's gradient once, when all that flows into it is summed, and
running out of memory is noticed before an addition, never inside one. So after a failure a
parameter has either the gradient of the whole micro-batch or none of it. The halves run with the
former frozen, so each parameter gets the micro-batch exactly once. This costs no copy of the
gradients, and what is frozen needs less memory the second time. The size that failed is remembered:
later micro-batches are split before they run. A probe can measure the size that fits instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl.utils.device import free_cached_memory
from verl.workers.engine.inputs import prompt_groups
from verl.workers.engine.memory import DeviceMemory, probe_token_budget
from verl.workers.schedule import MicroBatching, Passes, split_micro_batches

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MakePass = Callable[[list[int]], Result]
"""Runs the rows with these indices through the model; may raise `torch.OutOfMemoryError`."""


class RowDoesNotFitError(RuntimeError):
    """One row alone needs more memory than the device has left."""


class PassScheduler:
    """Which rows of an engine's batch run at once."""

    def __init__(self, memory: DeviceMemory | None, *, can_split: bool, probe: bool) -> None:
        """With `can_split` a micro-batch that does not fit runs in halves. Where ranks exchange
        tensors inside a forward pass, one must not run more micro-batches than the others.

        `memory` is None where it cannot be measured. With `probe` the first training step does.
        """
        self.training = FittingPasses(
            "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu", can_split=can_split
        )
        self.inference = FittingPasses(
            "log_prob_max_token_len_per_gpu or log_prob_micro_batch_size_per_gpu (of a critic: "
            "forward_max_token_len_per_gpu or forward_micro_batch_size_per_gpu)",
            can_split=can_split,
        )
        self._memory = memory
        self._can_split = can_split
        self._is_probe_due = probe
        self._token_budget: int | None = None

    def schedule(
        self,
        data: TensorDict,
        lengths: list[int],
        micro_batching: MicroBatching | Passes,
        *,
        prefix_sharing: bool,
    ) -> Passes:
        """The caller's micro-batches, or a split that keeps rows of one prompt together."""
        if not isinstance(micro_batching, MicroBatching):
            return micro_batching
        return split_micro_batches(
            lengths, micro_batching, prompt_groups(data) if prefix_sharing else None
        )

    def with_measured_size(
        self,
        schedule: Passes,
        lengths: list[int],
        run_rows: Callable[[int], None],
        *,
        row_tokens: int,
        bytes_to_come: Callable[[], int],
        discard: Callable[[], None],
    ) -> Passes:
        """The same rows in micro-batches of the measured size, once the probe has run.

        `run_rows(n)` runs forward and backward on n rows of `row_tokens` tokens, whose gradient
        `discard` throws away; `bytes_to_come()` will be allocated later and stay.
        """
        if not any(schedule):
            return schedule
        if self._is_probe_due:
            self._is_probe_due = False
            if self._memory is None or not self._can_split:
                reason = "ranks exchange tensors in a pass" if self._memory else "no CUDA device"
                logger.warning("probe_micro_batch has no effect: %s", reason)
            else:
                self._token_budget = probe_token_budget(
                    run_rows,
                    self._memory,
                    row_tokens=row_tokens,
                    start_tokens=max(sum(lengths[row] for row in rows) for rows in schedule),
                    max_tokens=sum(lengths[row] for rows in schedule for row in rows),
                    bytes_to_come=bytes_to_come(),
                )
                discard()
        if self._token_budget is None:
            return schedule
        return fill([row for rows in schedule for row in rows], lengths, self._token_budget)


class FittingPasses:
    """Runs micro-batches, each as large as memory allows as far as is known."""

    def __init__(self, settings: str, *, can_split: bool = True) -> None:
        """`settings` names the options that set the size, for the log."""
        self.max_tokens: int | None = None
        """No micro-batch of several rows has more tokens; None until one has failed."""

        self.num_splits = 0
        self._settings = settings
        self._can_split = can_split

    def run(
        self,
        rows: list[int],
        lengths: Sequence[int],
        make_pass: MakePass[Result],
        before_halves: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Result]:
        """The results of the passes over `rows`, in order: one, or several where one does not fit.

        `lengths` are the tokens of every row of the batch. After a failed pass, `before_halves()`
        surrounds those that take its place.
        """
        if not self._can_split:
            return [make_pass(rows)]
        results: list[Result] = []
        pending = [rows]
        while pending:
            parts = self.split(pending.pop(0), lengths)
            if len(parts) > 1:  # split again in turn: a failure may lower the limit meanwhile
                pending = parts + pending
                continue
            (part,) = parts
            num_tokens = sum(lengths[row] for row in part)
            try:
                results.append(make_pass(part))
                continue
            except torch.OutOfMemoryError as error:
                if len(part) < 2:
                    raise RowDoesNotFitError(row_message(num_tokens)) from error
            # Out of the handler: while the error lives, its traceback holds what was allocated.
            free_cached_memory()
            both = halves(part, lengths)
            self._lower(num_tokens, len(part), max(sum(lengths[r] for r in half) for half in both))
            with before_halves():
                for half in both:
                    results += self.run(half, lengths, make_pass, before_halves)
        return results

    def split(self, rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """The rows in groups that are within the limit; a single row is not split."""
        if self.max_tokens is None:
            return [rows]
        return fill(rows, lengths, self.max_tokens)

    def _lower(self, num_tokens: int, num_rows: int, max_tokens: int) -> None:
        assert self.max_tokens is None or max_tokens <= self.max_tokens, "split before it ran"
        self.num_splits += 1
        self.max_tokens = max_tokens
        logger.warning(
            "a micro-batch of %d tokens in %d rows did not fit into memory; it runs in halves, "
            "and from now on micro-batches have at most %d tokens. The gradient is the same. To "
            "start with that size, lower %s",
            num_tokens,
            num_rows,
            max_tokens,
            self._settings,
        )


class GradientArrivals:
    """The parameters that have received their gradient in the current backward pass.

    Hooks note numbers: one that held parameters would keep the model alive, since the collector
    does not look into hooks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._arrived: list[int] = []
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(_note, self._arrived, number))

    def clear(self) -> None:
        self._arrived.clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the parameters that have their gradient while the context lasts."""
        arrived = [self._parameters[number] for number in self._arrived]
        for parameter in arrived:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in arrived:
                parameter.requires_grad_(True)


def _note(arrived: list[int], number: int, parameter: Tensor) -> None:
    arrived.append(number)


def halves(rows: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two groups of consecutive rows, as equal in tokens as possible; neither is empty."""
    total = sum(lengths[row] for row in rows)
    before, best, border = 0, total, 1
    for index in range(1, len(rows)):
        before += lengths[rows[index - 1]]
        larger = max(before, total - before)
        if larger < best:
            best, border = larger, index
    return rows[:border], rows[border:]


def fill(rows: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups of consecutive rows, each with as many as stay within `max_tokens`, at least one."""
    groups, num_tokens = [rows[:1]], sum(lengths[row] for row in rows[:1])
    for row in rows[1:]:
        if num_tokens + lengths[row] > max_tokens:
            groups.append([])
            num_tokens = 0
        groups[-1].append(row)
        num_tokens += lengths[row]
    return groups


def row_message(num_tokens: int) -> str:
    return (
        f"one row of {num_tokens} tokens does not fit into memory, and a row is not split. "
        "Recompute activations (model.enable_gradient_checkpointing=True), keep them in CPU memory "
        "(model.enable_activation_offload=True), keep the optimizer's state there "
        "(fsdp_config.optimizer_offload=True), or allow shorter rows (data.max_prompt_length, "
        "data.max_response_length)"
    )
