"""The sequences that run at the moment: their tensors, and the steps that give them tokens.

Row i of the table, response slot i of the cache and entry i of the samples handed in belong
together. A step touches nothing but tensors; then the tokens of several steps are read at once.
What they mean (whether a text is complete, who waits for it) is the engine's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.utils.device import without_waiting
from verl.workers.rollout.native.cache_size import CacheSize, slots_that_fit
from verl.workers.rollout.native.kv_cache import CacheShape, KeysAndValues, KVCache
from verl.workers.rollout.native.lockstep import as_on_first_rank
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.prefill_attention import PrefillLayout, PrefillSequence
from verl.workers.rollout.native.requests import EngineLimits
from verl.workers.rollout.native.room import Room, SlotRoom
from verl.workers.rollout.native.row_table import RowTable
from verl.workers.rollout.native.sampler import Needs, next_tokens
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.seen_tokens import SeenTokens
from verl.workers.rollout.native.sequence import Group, Sample


@dataclass(frozen=True)
class StepOutput:
    """What a sample got in the last steps."""

    sample: Sample
    token_ids: list[int]
    log_probs: list[float]
    is_done: bool
    """The last of them is a stop token, or there is room for no more."""


class RunningBatch:
    """Keys, values and row tensors of up to as many sequences as memory and `limits` allow."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        size: CacheSize | None = None,
        make_cache: Callable[[CacheShape, int], KVCache] = KVCache,
    ) -> None:
        self.runner = runner
        self.limits = limits
        size = size or slots_that_fit(runner, limits)
        self.cache = make_cache(size.shape, size.num_slots)
        self.num_rows = num_rows = size.num_rows
        self.room: Room = SlotRoom(num_rows, size.shape.max_prompt_tokens)
        device = runner.device
        self._table = RowTable.empty(num_rows, limits.max_stop_tokens, device)
        self._seen = SeenTokens(num_rows, runner.vocabulary, device)
        block = (limits.steps_per_visit, num_rows)
        self._tokens = torch.zeros(block, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(block, device=device)

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        """Let samples in, which hold the last of the rows in use, and give each its first token.

        `sequences` are what must be computed for them, in the order of the samples; `num_groups`
        prompt slots are in use, theirs included.
        """
        rows = slice(samples[0].slot, samples[-1].slot + 1)
        self.cache.reserve(num_groups, rows.stop)
        hidden = self._prefill_hidden(sequences)  # first: the device works while the host goes on
        self._table[rows] = self._row_table(samples).to(self.runner.device)
        self._seen.enter(samples)
        logits = self._logits(hidden)
        source = np.arange(len(sequences)).repeat([len(sequence.slots) for sequence in sequences])
        logits = logits[without_waiting(torch.from_numpy(source), logits.device)]
        self._emit(0, rows, self._table[rows], logits, needs_of(samples))
        return self._read(samples, rows, 1)

    def make_room(self, samples: Sequence[Sample]) -> bool:
        """See that the next steps of these have memory to write to; False if there is too little.

        Slots have it from the start.
        """
        return True

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        """Give all rows their next tokens, up to `steps_per_visit` each."""
        rows = slice(0, len(samples))
        table, needs = self._table[rows], needs_of(samples)
        # No further than the first row that is full; stop tokens may still end a row in between.
        num_steps = min(sample.group.token_limit - sample.num_tokens for sample in samples)
        num_steps = min(num_steps, self.limits.steps_per_visit)
        layout = self.runner.decode_layout(self.cache, samples, table, num_steps)
        for step in range(num_steps):
            self._emit(step, rows, table, self.runner.decode(layout, table), needs)
        return self._read(samples, rows, num_steps)

    def flush(self) -> list[StepOutput]:
        """What `decode` has started and not yet given back: nothing here."""
        return []

    def reset(self) -> None:
        """Be as new after a step that failed half-way; no sample has a row."""

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        """Samples go to other rows, one after the other."""
        for move, sample in moves:
            self.cache.move_response(move, sample.num_own)
            self._table[move.target] = self._table[move.source]
            self._seen.move(move)

    def move_group(self, move: Move, group: Group) -> None:
        """The prompt of `group` goes to another slot."""
        self.cache.move_prompt(move, group.num_shared)

    def read(self, sample: Sample, num_own: int) -> list[KeysAndValues]:
        """Keys and values of a sample's shared prompt and of the first tokens of its own slot."""
        group = sample.group
        return self.cache.read(group.slot, group.num_shared, sample.slot, num_own)

    def _row_table(self, samples: Sequence[Sample]) -> RowTable:
        """In ordinary memory."""
        return RowTable.of(samples, self.limits.max_stop_tokens)

    def _prefill_hidden(self, sequences: Sequence[PrefillSequence]) -> Tensor:
        """Bring sequences into the cache; the hidden state of the last token of each."""
        layout = PrefillLayout(self.cache, sequences, self.runner.exact_capacity)
        return self.runner.prefill(layout, sequences)

    def _logits(self, hidden: Tensor) -> Tensor:
        """What `_emit` samples from."""
        return self.runner.logits(hidden)

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
            num_new = num_tokens - sample.num_tokens  # fewer than steps if it ended in between
            outputs.append(StepOutput(sample, tokens[:num_new], log_probs[:num_new], is_done))
        return outputs


def needs_of(samples: Sequence[Sample]) -> Needs:
    groups = dict.fromkeys(sample.group for sample in samples)
    return Needs.of([group.request.params for group in groups])
