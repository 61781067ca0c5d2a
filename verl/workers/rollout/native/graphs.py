"""Passes captured once per size and kind as CUDA graphs: one launch instead of hundreds.

A decode step is captured per batch size (`StepGraphs`). Prefills come in a few fixed sizes whose
inputs have fixed addresses, so that each can be a graph (`PrefillBuckets`):

    sequences --> one pinned buffer --> one copy --> ids, positions, tiles, copies --> replay

What the sequences leave free does nothing: tokens of id 0 that belong to no sequence, tiles of
length 0, and copies that write the last key and value to its position once more. A size is captured
when it is first needed. The first prefill of all takes the largest size, whatever it needs: later
graphs then find room in the memory that this one took.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.kernels.packed_attention import Tiles, tokens_per_tile
from verl.models.kernels.slot_prefill_attention import SlotTiles
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.cache import KVCache
from verl.workers.rollout.native.model_runner import (
    ModelRunner,
    packed_tokens,
    prefill_sizes,
)
from verl.workers.rollout.native.rows import Record
from verl.workers.rollout.native.slot_layouts import (
    SlotCopies,
    attention_in_slots,
    attention_of_tiles,
    continuations,
    copied_tokens,
    own_spans,
    shared_spans,
    slot_continuations,
)

HIGH_PRIORITY = -1
NUM_WARM_UPS = 2


class StepGraphs:
    """Replays work under a key that tells what it consists of; the first time, captures it.

    The work may touch only memory that outlives it or is freed inside it. All graphs take turns in
    one piece of memory: what one leaves there is gone after the next.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Kernels of a graph keep the priority of the stream they were captured on: beside training
        # passes those of a step go first.
        self._stream = torch.cuda.Stream(priority=HIGH_PRIORITY)

    def replay(
        self,
        key: Hashable,
        run: Callable[[], None],
        state: Callable[[], list[torch.Tensor]] = list,
    ) -> None:
        """`state` are tensors that `run` changes and that it must not change more than once."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(run, state())
        self._graphs[key].replay()

    def _capture(self, run: Callable[[], None], state: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in state]
        # Always the same stream: libraries keep a workspace for every stream they have seen.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):  # kernels are compiled and libraries set up
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on with work of their own on the device.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        except RuntimeError as error:
            raise RuntimeError(
                f"a pass of this model cannot be captured as a CUDA graph ({error}); it waits for "
                "the device, or data decide what it launches: use rollout.name=hf, vllm or sglang"
            ) from error
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        return graph


MOST_TOKENS = 32768
"""More keep a device busy for longer than the host takes to launch them, and would hold gigabytes
for their numbers in between."""


@dataclass(frozen=True)
class PrefillKind:
    """What a prefill consists of: with the cache's addresses, all that a graph depends on."""

    num_tokens: int

    has_shared: bool
    """Whether some tokens belong in prompt slots."""

    has_own: bool
    """Whether some belong in the rows' own slots."""

    has_known: bool
    """Whether earlier turns have left tokens in the slots."""


Replay = Callable[[PrefillKind, Callable[[], None]], None]
"""Does the work, now or as it was captured under this key."""


class PrefillBuckets:
    """Runs prefills of up to `max_tokens` new tokens through buffers of the next larger size.

    As graphs they hold about as much memory as one pass of the largest size takes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        max_tokens: int,
        num_rows: int,
        replay: Replay,
        pages: Tensor | None = None,
    ) -> None:
        self.runner = runner
        self.pages = pages
        self.cache = cache
        self.sizes = prefill_sizes(min(max_tokens, MOST_TOKENS))
        self._replay = replay
        self._buckets: dict[int, _Bucket] = {}
        probe = _TileProbe()
        hidden = runner.run_one_token(probe)
        self._hidden = hidden.new_zeros(num_rows, hidden.shape[1])
        self._tile_sizes = sorted(probe.tile_sizes)

    def last_hidden(self, sequences: Sequence[PrefillSequence]) -> Tensor | None:
        """The hidden state of each last token, which stays there until the next call.

        None where new tokens or copies are more than the largest size.
        """
        has_known = any(sequence.num_known for sequence in sequences)
        copies = [copied_tokens(find(sequences)) for find in (shared_spans, own_spans)]
        tokens = packed_tokens(sequences)
        num_tokens = max(len(tokens[0]), *(copy.shape[1] for copy in copies))
        if num_tokens > self.sizes[-1]:
            return None
        bucket = self._bucket(num_tokens)
        host, tiles = torch.device("cpu"), []
        for size in bucket.tile_sizes:
            if has_known:
                pieces = SlotTiles(slot_continuations(sequences), size, host)
            else:
                pieces = Tiles(continuations(sequences), size, host)
            tiles.append(pieces.columns.numpy())
        bucket.fill(tokens, copies, tiles)
        kind = PrefillKind(bucket.num_tokens, *(copy.size > 0 for copy in copies), has_known)
        self._replay(kind, lambda: self._run(bucket, kind))
        return self._hidden[: len(sequences)]

    def _run(self, bucket: "_Bucket", kind: PrefillKind) -> None:
        """Only tensors at fixed addresses decide what happens here."""
        layout = _BucketLayout(self.cache, bucket, kind, self.pages)
        hidden = self.runner.last_hidden(layout, bucket.ids, bucket.positions, bucket.last)
        self._hidden[: len(hidden)] = hidden

    def _bucket(self, num_tokens: int) -> "_Bucket":
        size = next(size for size in self.sizes if size >= num_tokens)
        if not self._buckets:
            size = self.sizes[-1]
        if size not in self._buckets:
            num_sequences = min(size, len(self._hidden))
            self._buckets[size] = _Bucket(size, num_sequences, self._tile_sizes, self.runner.device)
        return self._buckets[size]


class _Bucket:
    """The inputs of a prefill of one size, at fixed addresses."""

    def __init__(
        self, num_tokens: int, num_sequences: int, tile_sizes: Sequence[int], device: torch.device
    ) -> None:
        self.num_tokens = num_tokens
        self.tile_sizes = tile_sizes
        # A sequence has at most one tile that is not full.
        num_tiles = [-(-num_tokens // size) + num_sequences for size in tile_sizes]
        unused = [Tiles([], size, device) for size in tile_sizes]
        unused_in_slots = [SlotTiles([], size, device) for size in tile_sizes]
        shapes = [(num_tokens,), (num_tokens,), (num_sequences,), (3, num_tokens), (3, num_tokens)]
        fields = [(torch.long, torch.Size(shape)) for shape in shapes]
        fields += [(torch.int32, torch.Size((SlotTiles.NUM_COLUMNS, count))) for count in num_tiles]
        self._record = Record(fields)
        self._buffer = torch.zeros(self._record.num_bytes, dtype=torch.uint8, device=device)
        views = self._record.views(self._buffer)
        self.ids, self.positions, self.last = views[:3]
        self.shared, self.own = SlotCopies(views[3]), SlotCopies(views[4])
        self.tiles = dict(zip(tile_sizes, unused, strict=True))
        self.slot_tiles = dict(zip(tile_sizes, unused_in_slots, strict=True))
        for tiles, in_slots, columns in zip(unused, unused_in_slots, views[5:], strict=True):
            tiles.columns = columns[: len(tiles.columns)]
            in_slots.columns = columns

    def fill(
        self,
        tokens: Sequence[np.ndarray],
        copies: Sequence[np.ndarray],
        tiles: Sequence[np.ndarray],
    ) -> None:
        """Ids, positions and indices of last tokens; shared and own copies; tiles of each size,
        which take as many columns as they have."""
        buffer = self._record.on_host(self._buffer.device)
        views = [view.numpy() for view in self._record.views(buffer)]
        for view, column in zip(views[:3], tokens, strict=True):
            _put(view, column, 0)
        for view, column in zip(views[3:5], copies, strict=True):
            _put(view, column, column[:, -1:] if column.size else 0)
        for view, column in zip(views[5:], tiles, strict=True):
            _put(view[: len(column)], column, 0)
        self._buffer.copy_(buffer, non_blocking=True)


def _put(view: np.ndarray, column: np.ndarray, rest: np.ndarray | int) -> None:
    """`column`, padded with `rest`."""
    count = column.shape[-1]
    view[..., :count], view[..., count:] = column, rest


class _BucketLayout(AttentionLayout):
    """What is in a bucket, end to end; keys and values go to their slots."""

    def __init__(
        self, cache: KVCache, bucket: _Bucket, kind: PrefillKind, pages: Tensor | None
    ) -> None:
        self.cache = cache
        self.pages = pages
        self.bucket = bucket
        self.kind = kind

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self.kind.has_shared:
            self.bucket.shared.write(self.cache.prompt[layer], key, value)
        if self.kind.has_own:
            self.bucket.own.write(self.cache.response[layer], key, value)
        size = tokens_per_tile(query, key)
        if self.kind.has_known:
            tiles = self.bucket.slot_tiles[size]
            return attention_in_slots(self.cache, layer, query, tiles, options, self.pages)
        return attention_of_tiles(query, key, value, self.bucket.tiles[size], options)


class _TileProbe(AttentionLayout):
    """Writes down how many tokens a tile has in each layer."""

    def __init__(self) -> None:
        self.tile_sizes: set[int] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.tile_sizes.add(tokens_per_tile(query, key))
        return query.new_zeros(*query.shape[:2], value.shape[2])
