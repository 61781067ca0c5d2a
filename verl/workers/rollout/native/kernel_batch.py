"""The running sequences on a device with kernels: no copying, and no host work per token.

Rows are kept side by side, but their slots are not: a row that moves keeps its slot, and a column
of the table says which it is. On CUDA the whole step (embedding, layers, attention, head, sampling,
bookkeeping) is captured once per batch size as a graph; a visit replays it several times and then
reads what came out. Graphs remember addresses, so everything they touch is allocated once.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from verl.models.attention import AttentionLayout
from verl.models.head import OutputHead
from verl.models.kernels.sampling import draw_tokens
from verl.workers.rollout.native.kv_cache import KeysAndValues, KVCache
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.prefill_attention import PrefillSequence
from verl.workers.rollout.native.requests import EngineLimits
from verl.workers.rollout.native.row_table import RowTable
from verl.workers.rollout.native.running_batch import NewTokens, RunningBatch, needs_of
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import Group, Sample
from verl.workers.rollout.native.slot_layouts import SlotDecodeLayout, SlotPrefillLayout
from verl.workers.rollout.native.steady_cache import SteadyKVCache
from verl.workers.rollout.native.step_graphs import StepGraphs


class KernelBatch(RunningBatch):
    """A `RunningBatch` whose steps run through kernels, as graphs where the device has them."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits) -> None:
        is_cuda = runner.device.type == "cuda"
        super().__init__(runner, limits, SteadyKVCache if is_cuda else KVCache)
        num_slots = self.cache.max_slots
        self._slot_of_row = list(range(num_slots))
        self._slot_of_prompt = list(range(num_slots))
        self._table.slot.copy_(torch.arange(num_slots))
        self._step = torch.zeros(1, dtype=torch.long, device=runner.device)
        self._graphs: StepGraphs | None = None
        if is_cuda:
            self._graphs = StepGraphs(self._run_step, self._step_state, num_slots)

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[NewTokens]:
        self.cache.reserve(self.cache.max_slots, self.cache.max_slots)  # any slot may be next
        return super().prefill(samples, [self._placed(s) for s in sequences], num_groups)

    def decode(self, samples: Sequence[Sample]) -> list[NewTokens]:
        needs = needs_of(samples)
        left = max(sample.group.token_limit - sample.num_tokens for sample in samples)
        num_steps = min(left, self.limits.steps_per_visit)  # a row that is full stays as it is
        rows = slice(0, len(samples))
        self._step.zero_()
        for step in range(num_steps):
            if needs.candidates or needs.min_p or needs.penalty:
                table = self._table[rows]
                hidden = self.runner.decode_hidden(SlotDecodeLayout(self.cache, table), table)
                self._emit(step, rows, table, self.runner.logits(hidden), needs)
            elif self._graphs is None:
                self._run_step(len(samples))
            else:
                self._graphs.replay(len(samples))
        return self._read(samples, rows, num_steps)

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        """Rows change places, slots and all; the slots themselves stay where they are."""
        if not moves:
            return
        order = list(range(max(max(move.source, move.target) for move, _ in moves) + 1))
        for move, _ in moves:
            for rows in (order, self._slot_of_row):
                rows[move.target], rows[move.source] = rows[move.source], rows[move.target]
            self._seen.move(move)
        sources = torch.tensor(order, device=self.runner.device)
        self._table[: len(order)] = self._table[sources]

    def move_group(self, move: Move, group: Group) -> None:
        slots = self._slot_of_prompt
        slots[move.target], slots[move.source] = slots[move.source], slots[move.target]

    def read(self, sample: Sample, num_own: int) -> list[KeysAndValues]:
        group, slots = sample.group, self._slot_of_row
        prompt_slot = self._slot_of_prompt[group.slot]
        return self.cache.read(prompt_slot, group.num_shared, slots[sample.slot], num_own)

    def _row_table(self, samples: Sequence[Sample]) -> RowTable:
        table = super()._row_table(samples)
        prompts = [self._slot_of_prompt[sample.group.slot] for sample in samples]
        slots = [self._slot_of_row[sample.slot] for sample in samples]
        return dataclasses.replace(
            table,
            prompt_slot=table.prompt_slot.new_tensor(prompts),
            slot=table.slot.new_tensor(slots),
        )

    def _prefill_layout(self, sequences: Sequence[PrefillSequence]) -> AttentionLayout:
        if any(sequence.num_known for sequence in sequences):
            return super()._prefill_layout(sequences)
        return SlotPrefillLayout(self.cache, sequences)

    def _placed(self, sequence: PrefillSequence) -> PrefillSequence:
        """With slots of the cache instead of rows."""
        prompt = sequence.prompt_slot
        return dataclasses.replace(
            sequence,
            prompt_slot=None if prompt is None else self._slot_of_prompt[prompt],
            slots=[self._slot_of_row[row] for row in sequence.slots],
        )

    @torch.no_grad()
    def _run_step(self, num_rows: int) -> None:
        """One token for the first rows. Only tensors decide what happens here."""
        table, head = self._table[:num_rows], OutputHead.of(self.runner.module)
        hidden = self.runner.decode_hidden(SlotDecodeLayout(self.cache, table), table)
        tokens, log_probs = draw_tokens(
            F.linear(hidden, head.weight, head.bias),
            table.settings.temperature,
            table.settings.is_greedy,
            table.settings.seed,
            table.num_tokens,
            scale=head.scale,
            softcap=head.softcap,
        )
        self._tokens[:, :num_rows].index_copy_(0, self._step, tokens[None])
        self._log_probs[:, :num_rows].index_copy_(0, self._step, log_probs[None])
        self._step.add_(1)
        table.advance(tokens)

    def _step_state(self) -> list[torch.Tensor]:
        """What a step changes, besides keys and values that a step writes before it reads them."""
        table = self._table
        return [table.newest, table.num_tokens, table.is_done, self._step]
