"""The running sequences and the steps that give them tokens.

A `Batch` is what the engine steps; what the tokens mean (whether a text is complete, who waits for
it) is the engine's business. Its kinds are siblings: `RunningBatch` here is plain torch and runs
anywhere, `KernelBatch` runs through kernels on slots, `PagedBatch` through kernels on pages.

Row i of the table, response slot i of the cache and entry i of the samples handed in belong
together. A step touches nothing but tensors; then the tokens of several steps are read at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.utils.device import without_waiting
from verl.workers.rollout.native.attention import PrefillLayout, PrefillSequence
from verl.workers.rollout.native.cache import CacheSize, KVCache, slots_that_fit
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.pages import MemoryBudget, SlotBudget
from verl.workers.rollout.native.rows import RowTable
from verl.workers.rollout.native.sampler import Needs, SeenTokens, as_on_first_rank, next_tokens
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import EngineLimits, Group, KnownTokens, Sample


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a sample got in the last steps."""

    sample: Sample
    token_ids: list[int]
    log_probs: list[float]
    is_done: bool
    """The last of them is a stop token, or the sample may have no more."""


class Batch(ABC):
    """Keys, values and row tensors of up to `num_rows` sequences."""

    cache: KVCache
    num_rows: int
    budget: MemoryBudget

    @abstractmethod
    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        """Give admitted samples, which hold the last of the rows in use, their first token.

        `sequences` are what must be computed for them, in the order of the samples; `num_groups`
        prompt slots are in use, theirs included.
        """

    @abstractmethod
    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        """Give all rows their next tokens, up to `tokens_per_step` each."""

    @abstractmethod
    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        """Move samples to other rows, one after the other."""

    @abstractmethod
    def move_group(self, move: Move, group: Group) -> None:
        """Move the prompt of `group` to another slot."""

    @abstractmethod
    def keep(self, sample: Sample) -> KnownTokens:
        """Keep keys and values of a sample that ends, for its session.

        Without those of its last token, which may not have been computed.
        """

    def let_evict(self, evict: Callable[[], bool]) -> None:
        """Tell what frees memory of the cache that sessions hold, one at a time; False if none
        does. Copies need none."""
        return

    def relocate(self, groups: Sequence[Group]) -> None:
        """Copy what is known of admitted groups to where they expect it; it is usually there."""
        return

    def reserve(self, samples: Sequence[Sample]) -> bool:
        """Give the next steps of these memory to write to; False if there is too little.

        Slots have it from the start.
        """
        return True

    def flush(self) -> list[StepOutput]:
        """Wait for what `decode` has started and not yet returned."""
        return []

    @abstractmethod
    def reset(self) -> None:
        """Be as new after a step that failed half-way; no sample has a row."""


class RunningBatch(Batch):
    """Plain torch on slots, as many as memory and `limits` allow."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits) -> None:
        self.runner = runner
        self.limits = limits
        size: CacheSize = slots_that_fit(runner.slot_shape(limits), limits, runner.tp_group)
        self.cache = KVCache(size.shape, size.num_slots)
        self.num_rows = num_rows = size.num_rows
        self.budget = SlotBudget(num_rows, size.shape.max_prompt_tokens)
        device = runner.device
        self._table = RowTable.empty(num_rows, limits.max_stop_tokens, device)
        self._seen = SeenTokens(num_rows, runner.vocabulary, device)
        block = (limits.tokens_per_step, num_rows)
        self._tokens = torch.zeros(block, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(block, device=device)

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        rows = slice(samples[0].slot, samples[-1].slot + 1)
        self.cache.reserve(num_groups, rows.stop)
        layout = PrefillLayout(self.cache, sequences, self.runner.exact_capacity)
        hidden = self.runner.prefill(layout, sequences)
        self._keep_routes(samples, sequences)
        table = RowTable.of(samples, self.limits.max_stop_tokens)
        self._table[rows] = table.to(self.runner.device)
        self._seen.enter(samples)
        logits = rows_of_samples(self.runner.logits(hidden), sequences)
        self._emit(0, rows, self._table[rows], logits, needs_of(samples))
        return self._read(samples, rows, 1)

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        rows = slice(0, len(samples))
        table, needs = self._table[rows], needs_of(samples)
        # No further than the first row that is full; stop tokens may still end a row in between.
        num_steps = min(sample.group.token_limit - sample.num_tokens for sample in samples)
        num_steps = min(num_steps, self.limits.tokens_per_step)
        layout = self.runner.decode_layout(self.cache, samples, table, num_steps)
        routes, recorder = [], self.runner.recorder
        for step in range(num_steps):
            self._emit(step, rows, table, self.runner.decode(layout, table), needs)
            if recorder is not None:
                routes.append(recorder.routes(len(samples)))
        outputs = self._read(samples, rows, num_steps)
        for row, output in enumerate(outputs if routes else ()):
            # A step computes the token before the one that it gives.
            output.sample.routes += [
                step[row : row + 1] for step in routes[: len(output.token_ids)]
            ]
        return outputs

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        for move, sample in moves:
            self.cache.move_response(move, sample.num_own)
            self._table[move.target] = self._table[move.source]
            self._seen.move(move)

    def move_group(self, move: Move, group: Group) -> None:
        self.cache.move_prompt(move, group.num_shared)

    def keep(self, sample: Sample) -> KnownTokens:
        group, num_own = sample.group, sample.num_own - 1
        layers = self.cache.read(group.slot, group.num_shared, sample.slot, num_own)
        routes = torch.cat(sample.routes) if sample.routes else None
        return KnownTokens(sample.identity[:-1], layers, routes=routes)

    def reset(self) -> None:
        """Rows are filled whole when samples are admitted."""

    def _keep_routes(self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence]) -> None:
        """Samples begin with the routes of what was computed for them, and of what was known."""
        if self.runner.recorder is None:
            return
        counts = [sequence.num_new for sequence in sequences]
        parts = self.runner.recorder.routes(sum(counts)).split(counts)
        entered = iter(samples)
        for sequence, part in zip(sequences, parts, strict=True):
            known = [] if sequence.known.routes is None else [sequence.known.routes]
            for _ in sequence.slots:
                next(entered).routes = [*known, part]

    def _emit(self, step: int, rows: slice, table: RowTable, logits: Tensor, needs: Needs) -> None:
        """Sample a token for each of the rows and write it down; nothing goes to the host."""
        seen = self._seen.rows(rows) if needs.penalty else None
        tokens, log_probs = as_on_first_rank(
            *next_tokens(logits, table.settings, needs, table.num_tokens, seen),
            self.runner.tp_group,
        )
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        self._tokens[step, rows] = tokens
        self._log_probs[step, rows] = log_probs
        table.advance(tokens)

    def _read(self, samples: Sequence[Sample], rows: slice, num_steps: int) -> list[StepOutput]:
        """Bring to the host what the last steps gave to the rows."""
        table, outputs = self._table[rows], []
        for sample, tokens, log_probs, num_tokens, is_done in zip(
            samples,
            self._tokens[:num_steps, rows].t().tolist(),
            self._log_probs[:num_steps, rows].t().tolist(),
            table.num_tokens.tolist(),
            table.is_done.tolist(),
            strict=True,
        ):
            num_new = num_tokens - sample.next_index  # fewer than steps if it ended in between
            outputs.append(StepOutput(sample, tokens[:num_new], log_probs[:num_new], is_done))
        return outputs


def rows_of_samples(logits: Tensor, sequences: Sequence[PrefillSequence]) -> Tensor:
    """From the logits of each sequence to those of each sample: a prompt has several samples."""
    source = np.arange(len(sequences)).repeat([len(sequence.slots) for sequence in sequences])
    return logits[without_waiting(torch.from_numpy(source), logits.device)]


def needs_of(samples: Sequence[Sample]) -> Needs:
    """What the sampler must do for any of these."""
    groups = dict.fromkeys(sample.group for sample in samples)
    return Needs.of([group.request.params for group in groups])
