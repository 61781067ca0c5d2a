"""Decode steps and prefills through kernels: no copying, and no host work per token.

Rows are kept side by side, but their slots are not: a row that moves keeps its slot, and a column
of the table says which it is. Rows behind those in use, which a graph computes as well, are idle.
On CUDA the whole step (embedding, layers, attention, head, sampling, bookkeeping) is captured as a
graph, once per batch size and `Draw`; an engine step replays it several times and then reads the
outputs of the engine step before. So are prefills, up to the hidden states of last tokens
(`graphs`). Graphs remember addresses, so everything they touch is allocated once.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verl.models.attention import AttentionLayout
from verl.models.head import OutputHead, raw_logits
from verl.models.kernels.filters import Filters, Repetition
from verl.models.kernels.row_steps import StepBlock, StepRows, end_step
from verl.models.kernels.sampling import draw_tokens
from verl.utils.device import collect_seldom, without_waiting
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.batch import StepOutput, needs_of, rows_of_samples
from verl.workers.rollout.native.cache import KVCache
from verl.workers.rollout.native.graphs import PrefillBuckets, StepGraphs
from verl.workers.rollout.native.model_runner import ModelRunner, batch_sizes
from verl.workers.rollout.native.pages import SCRATCH, KernelBudget
from verl.workers.rollout.native.rows import RowTable
from verl.workers.rollout.native.sampler import Needs, SeenTokens, as_on_first_rank
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import EngineLimits, Sample
from verl.workers.rollout.native.slot_layouts import SlotPrefillLayout


class KernelSteps:
    """The rows of a batch on a device with kernels, as graphs where the device has them.

    `layout` gives the attention of a step over the cache, for some rows of the table; `budget` says
    which slots they have, or which lines of the page table `pages`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        cache: KVCache,
        budget: KernelBudget,
        num_rows: int,
        layout: Callable[[RowTable], AttentionLayout],
        pages: torch.Tensor | None = None,
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.cache = cache
        self.budget = budget
        self.num_rows = num_rows
        self._pages = pages
        self._layout = layout
        device = runner.device
        is_cuda = device.type == "cuda"
        self.table = RowTable.empty(num_rows, limits.max_stop_tokens, device)
        self._seen = SeenTokens(num_rows, runner.vocabulary, device)
        block = (limits.tokens_per_step, num_rows)
        self._tokens = torch.zeros(block, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(block, device=device)
        self.reset()
        self._num_steps = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.in_flight: list[_Block] = []  # oldest first
        self._has_prefilled = False  # whether the newest is a prefill of this engine step
        self.is_late = is_cuda
        self._sizes = batch_sizes(num_rows)
        self.graphs: StepGraphs | None = None
        self.buckets: PrefillBuckets | None = None
        if is_cuda:
            self.graphs = StepGraphs()
            self.buckets = PrefillBuckets(
                runner, cache, limits.max_prefill_tokens, num_rows, self.graphs.replay, pages
            )
            collect_seldom()

    def reset(self) -> None:
        """Take all rows out."""
        self._num_filled = self.num_rows  # rows that may not be idle, from the first on
        self._idle_rows_from(0)

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence]
    ) -> list[StepOutput]:
        """As `Batch.prefill`; slots are given as rows and looked up here."""
        rows = slice(samples[0].slot, samples[-1].slot + 1)
        self.cache.reserve(self.cache.max_slots, self.cache.max_slots)  # any slot may be next
        sequences = self._placed(samples, sequences)
        self._num_filled = max(self._num_filled, rows.stop)
        hidden = self._prefill_hidden(sequences)  # first: the device works while the host goes on
        self.table[rows] = self._row_table(samples).to(self.runner.device)
        self._seen.enter(samples)
        logits = rows_of_samples(self._logits(hidden), sequences)
        table = self.table[rows]
        tokens, log_probs = self._draw(rows, table, logits, Draw.of(needs_of(samples)))
        self._tokens[0, rows] = tokens
        self._log_probs[0, rows] = log_probs
        table.advance(tokens)
        self._send(samples, rows, 1)
        self._has_prefilled = True
        return [] if self.is_late else self.flush()

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        """Start the next steps of all rows; return what was started before them.

        So the device has work while the host reads. Rows that end in between stand still until the
        host has seen it. A prefill is read one engine step late only where no steps follow it:
        meanwhile the host prepares the next one. The last steps are read as soon as no row can get
        more.
        """
        has_started = self._start(samples) or self._has_prefilled
        self._has_prefilled = False
        return self._finish_all_but(1 if self.is_late and has_started else 0)

    def flush(self) -> list[StepOutput]:
        """Wait for all that was started, and return its outputs."""
        self._has_prefilled = False
        return self._finish_all_but(0)

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        """Rows are reordered with their slot numbers; the slots themselves stay where they are."""
        if not moves:
            return
        order = list(range(max(max(move.source, move.target) for move, _ in moves) + 1))
        for move, _ in moves:
            order[move.target], order[move.source] = order[move.source], order[move.target]
            self._seen.move(move)
        sources = without_waiting(torch.tensor(order), self.runner.device)
        self.table[: len(order)] = self.table[sources]

    def num_ahead(self, samples: Sequence[Sample]) -> list[int]:
        """Tokens that each sample gets by the steps that are in flight, if it does not end."""
        ahead: Counter[Sample] = Counter()
        for block in self.in_flight:
            ahead.update(dict.fromkeys(block.samples, block.num_steps))
        return [ahead[sample] for sample in samples]

    def _start(self, samples: Sequence[Sample]) -> bool:
        """Whether there was anything to start."""
        draw, num_rows = Draw.of(needs_of(samples)), len(samples)
        num_steps = min(self._most_left(samples), self.limits.tokens_per_step)
        if num_steps <= 0:
            return False
        self._idle_rows_from(num_rows)
        self._num_steps.zero_()
        for _ in range(num_steps):
            if self.graphs is None:
                self._run_step(num_rows, draw)
            else:
                self._replay_step(self.graphs, num_rows, draw)
        self._send(samples, slice(0, num_rows), num_steps)
        return True

    def _idle_rows_from(self, num_rows: int) -> None:
        """Rows that are no longer used write to `SCRATCH`: their slots may be others' by now."""
        if num_rows < self._num_filled:
            idle = self.table[num_rows : self._num_filled]
            idle.slot.fill_(SCRATCH)
            for column in (idle.num_tokens, idle.num_own_prompt, idle.num_shared):
                column.zero_()
        self._num_filled = num_rows

    def _replay_step(self, graphs: StepGraphs, num_rows: int, draw: "Draw") -> None:
        size = next(size for size in self._sizes if size >= num_rows)
        graphs.replay(
            DecodeKind(size, draw),
            lambda: self._run_step(size, draw),
            lambda: self._step_state(draw),
        )

    def _send(self, samples: Sequence[Sample], rows: slice, num_steps: int) -> None:
        """Let the tokens of the last steps come to the host."""
        table = self.table[rows]
        columns = (self._tokens[:num_steps, rows].t(), self._log_probs[:num_steps, rows].t())
        # Copies of their own: the next steps write over these.
        copies = [x.clone() for x in (*columns, table.num_tokens, table.is_done)]
        self.in_flight.append(_Block.read(list(samples), num_steps, copies))

    def _most_left(self, samples: Sequence[Sample]) -> int:
        """Tokens that some row may still get after the steps that are in flight."""
        return max(
            sample.group.token_limit - sample.num_tokens - num_ahead
            for sample, num_ahead in zip(samples, self.num_ahead(samples), strict=True)
        )

    def _finish_all_but(self, num_kept: int) -> list[StepOutput]:
        """What the samples of the oldest blocks got; those that have ended since get nothing."""
        num_read = len(self.in_flight) - num_kept
        blocks, self.in_flight = self.in_flight[:num_read], self.in_flight[num_read:]
        outputs: list[StepOutput] = []
        num_given: Counter[Sample] = Counter()
        for block in blocks:
            for sample, tokens, log_probs, num_tokens, is_done in block.rows():
                if not sample.is_finished:
                    num_new = num_tokens - sample.next_index - num_given[sample]
                    assert 0 <= num_new <= block.num_steps, "host and device count alike"
                    num_given[sample] += num_new
                    outputs.append(
                        StepOutput(sample, tokens[:num_new], log_probs[:num_new], is_done)
                    )
        return outputs

    def _row_table(self, samples: Sequence[Sample]) -> RowTable:
        table = RowTable.of(samples, self.limits.max_stop_tokens)
        prompts = [self.budget.prompt_slot_of(sample.group) for sample in samples]
        slots = [self.budget.slot_of(sample) for sample in samples]
        return dataclasses.replace(
            table,
            prompt_slot=table.prompt_slot.new_tensor(prompts),
            slot=table.slot.new_tensor(slots),
        )

    def _prefill_hidden(self, sequences: Sequence[PrefillSequence]) -> torch.Tensor:
        has_media = any(sequence.media for sequence in sequences)  # which no graph computes
        hidden = None
        if self.buckets is not None and not has_media:
            hidden = self.buckets.last_hidden(sequences)
        if hidden is not None:
            return hidden
        layout = SlotPrefillLayout(self.cache, sequences, self._pages)
        return self.runner.prefill(layout, sequences)

    @torch.no_grad()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits in the dtype of the output layer."""
        return raw_logits(hidden, OutputHead.of(self.runner.module))

    def _draw(
        self, rows: slice, table: RowTable, logits: torch.Tensor, draw: "Draw"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens from raw logits; log-probabilities come from the kernel that training uses, but
        for rows that have those of the filtered distribution."""
        head, settings = OutputHead.of(self.runner.module), table.settings
        filters = repetition = None
        if draw.filters:
            filters = Filters(settings.top_k, settings.top_p, settings.min_p)
        if draw.penalty:
            repetition = Repetition(settings.repetition_penalty, self._seen.rows(rows))
        tokens, log_probs = draw_tokens(
            logits,
            settings.temperature,
            settings.is_greedy,
            settings.seed,
            table.num_tokens,
            scale=head.scale,
            softcap=head.softcap,
            filters=filters,
            repetition=repetition,
            renormalizes=settings.renormalizes if draw.renormalizes else None,
        )
        tokens, log_probs = as_on_first_rank(tokens, log_probs, self.runner.tp_group)
        if repetition is not None:
            repetition.seen.scatter_(1, tokens[:, None], True)
        return tokens, log_probs

    def _placed(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence]
    ) -> list[PrefillSequence]:
        """The sequences with slots of the cache instead of rows."""
        slots = {sample.slot: self.budget.slot_of(sample) for sample in samples}
        prompts = {s.group.slot: self.budget.prompt_slot_of(s.group) for s in samples}
        return [
            dataclasses.replace(
                sequence,
                prompt_slot=prompts[sequence.prompt_slot],
                slots=[slots[row] for row in sequence.slots],
            )
            for sequence in sequences
        ]

    @torch.no_grad()
    def _run_step(self, num_rows: int, draw: "Draw") -> None:
        """One token for the first rows. Only tensors decide what happens here."""
        table = self.table[:num_rows]
        hidden = self.runner.decode_hidden(self._layout(table), table)
        tokens, log_probs = self._draw(slice(0, num_rows), table, self._logits(hidden), draw)
        rows = StepRows(
            table.newest, table.num_tokens, table.token_limit, table.is_done, table.stop_ids
        )
        block = StepBlock(self._tokens, self._log_probs, self._num_steps)
        end_step(tokens, log_probs, rows, block)

    def _step_state(self, draw: "Draw") -> list[torch.Tensor]:
        """What a step changes, besides keys and values that a step writes before it reads them."""
        table = self.table
        seen = [self._seen.rows(slice(None))] if draw.penalty else []
        return [table.newest, table.num_tokens, table.is_done, self._num_steps, *seen]


@dataclass(frozen=True)
class DecodeKind:
    """What a step consists of: with addresses that never change, all that a graph depends on."""

    num_rows: int
    draw: "Draw"


@dataclass(frozen=True)
class Draw:
    """What some row asks for when tokens are drawn; other rows pay little and get the same."""

    filters: bool
    """top-k, top-p or min-p"""

    penalty: bool
    renormalizes: bool

    @classmethod
    def of(cls, needs: Needs) -> "Draw":
        return cls(
            filters=needs.candidates or needs.min_p,
            penalty=needs.penalty,
            renormalizes=needs.renormalizes,
        )


@dataclass(frozen=True)
class _Block:
    """Some steps of some rows, on their way to the host."""

    samples: list[Sample]
    num_steps: int
    columns: list[torch.Tensor]
    """Tokens and log-probabilities (rows, steps); tokens so far and whether a row is done."""

    arrival: torch.cuda.Event | None

    @classmethod
    def read(cls, samples: list[Sample], num_steps: int, columns: list[torch.Tensor]) -> "_Block":
        if columns[0].device.type != "cuda":
            return cls(samples, num_steps, columns, None)
        on_host = [column.to("cpu", non_blocking=True) for column in columns]
        arrival = torch.cuda.Event()
        arrival.record()
        return cls(samples, num_steps, on_host, arrival)

    def rows(self) -> Iterator[tuple[Sample, list[int], list[float], int, bool]]:
        if self.arrival is not None:
            self.arrival.synchronize()
        return zip(self.samples, *(column.tolist() for column in self.columns), strict=True)
