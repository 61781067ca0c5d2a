"""A micro-batch that does not fit into memory is halved and run again; the gradient is the same.

    micro-batch of 8 rows      backward runs out of memory; parameters 7 to 9 have their gradient
      first 4, then last 4     with parameters 7 to 9 frozen: 0 to 6 get theirs from the halves

A backward pass adds to each parameter's gradient once, when all that flows into it is summed, and
running out of memory is noticed before an addition, never inside one. So after a failure a
parameter has either the gradient of the whole micro-batch or nothing of it. The halves are run with
the former frozen, so each parameter gets the micro-batch exactly once. This costs no copy of the
gradients, and what is frozen needs less memory the second time.

The size that failed is remembered: later micro-batches are cut before they run.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from verl.utils.device import free_cached_memory

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MakePass = Callable[[list[int]], Result]
"""Runs the rows with these indices through the model; may raise `torch.OutOfMemoryError`."""


class RowDoesNotFitError(RuntimeError):
    """One row alone needs more memory than the device has left."""


class FittingPasses:
    """Passes over groups of rows, each as large as memory allows as far as is known."""

    def __init__(self, settings: str) -> None:
        self.max_tokens: int | None = None
        """No pass over several rows has more tokens; None until a pass has failed."""

        self.num_splits = 0
        self._settings = settings

    def run(
        self,
        rows: list[int],
        lengths: Sequence[int],
        make_pass: MakePass[Result],
        before_halves: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Result]:
        """What the passes over `rows` gave, in order: one, or several where one does not fit.

        `lengths` are the tokens of every row of the batch. After a failed pass, `before_halves()`
        surrounds those that take its place.
        """
        parts = self.cut(rows, lengths)
        if len(parts) == 1:
            return self._pass_or_halves(rows, lengths, make_pass, before_halves)
        results = []
        for part in parts:  # cut again in its turn: one before it may have lowered the limit
            results += self.run(part, lengths, make_pass, before_halves)
        return results

    def cut(self, rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """The rows in groups that are within the limit; a row alone is not cut."""
        if self.max_tokens is None:
            return [rows]
        return fill(rows, lengths, self.max_tokens)

    def _pass_or_halves(
        self,
        rows: list[int],
        lengths: Sequence[int],
        make_pass: MakePass[Result],
        before_halves: Callable[[], AbstractContextManager[None]],
    ) -> list[Result]:
        try:
            return [make_pass(rows)]
        except torch.OutOfMemoryError as error:
            num_tokens = sum(lengths[row] for row in rows)
            if len(rows) < 2:
                raise RowDoesNotFitError(self._row_message(num_tokens)) from error
        # Out of the handler: while the error lives, its traceback holds what the pass allocated.
        free_cached_memory()
        parts = halves(rows, lengths)
        self._lower(num_tokens, len(rows), max(sum(lengths[r] for r in part) for part in parts))
        results = []
        with before_halves():
            for part in parts:
                results += self.run(part, lengths, make_pass, before_halves)
        return results

    def _lower(self, num_tokens: int, num_rows: int, max_tokens: int) -> None:
        assert self.max_tokens is None or max_tokens <= self.max_tokens, "cut before it ran"
        self.num_splits += 1
        self.max_tokens = max_tokens
        logger.warning(
            "a micro-batch of %d tokens in %d rows did not fit into memory; it is run in halves, "
            "and from now on micro-batches have at most %d tokens. The gradient is the same. To "
            "start with that size, lower %s",
            num_tokens,
            num_rows,
            max_tokens,
            self._settings,
        )

    def _row_message(self, num_tokens: int) -> str:
        return (
            f"one row of {num_tokens} tokens does not fit into memory, and a row is not cut. "
            "Compute activations again (model.enable_gradient_checkpointing=True), keep them in "
            "CPU memory (model.enable_activation_offload=True), keep the optimizer's state there "
            "(fsdp_config.optimizer_offload=True), or allow shorter rows (data.max_prompt_length, "
            "data.max_response_length)"
        )


class GradientArrivals:
    """Which parameters have got their gradient since the current backward pass began."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._arrived: list[Tensor] = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived.append)

    def clear(self) -> None:
        self._arrived.clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Those that have their gradient get no more of it while the context lasts."""
        arrived = list(self._arrived)
        for parameter in arrived:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in arrived:
                parameter.requires_grad_(True)


def halves(rows: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two groups of consecutive rows, as equal in tokens as may be; neither is empty."""
    total = sum(lengths[row] for row in rows)
    before, best, cut = 0, total, 1
    for place in range(1, len(rows)):
        before += lengths[rows[place - 1]]
        larger = max(before, total - before)
        if larger < best:
            best, cut = larger, place
    return rows[:cut], rows[cut:]


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
