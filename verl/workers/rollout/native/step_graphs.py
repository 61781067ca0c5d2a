"""A step captured once per batch size and kind: one launch instead of hundreds. CUDA only."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from verl.utils.streams import HIGH_PRIORITY

NUM_WARM_UPS = 2
SMALLEST = 8

Kind = TypeVar("Kind")


class StepGraphs(Generic[Kind]):
    """Replays `run(num_rows, kind)` on at least as many rows as asked for.

    `run` may touch only memory that outlives it or is freed inside it, and must do no harm when it
    runs on rows that nobody uses. `state` are the tensors that such a step changes; capturing
    leaves them as they were. A kind is hashable, and decides which work a step consists of.
    """

    def __init__(
        self,
        run: Callable[[int, Kind], None],
        state: Callable[[Kind], list[torch.Tensor]],
        max_rows: int,
    ) -> None:
        self._run = run
        self._state = state
        self._sizes = batch_sizes(max_rows)
        self._graphs: dict[tuple[int, Kind], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Kernels of a graph keep the priority of the stream they were captured on: beside training
        # passes those of a step go first.
        self._stream = torch.cuda.Stream(priority=HIGH_PRIORITY)

    def replay(self, num_rows: int, kind: Kind) -> None:
        size = next(size for size in self._sizes if size >= num_rows)
        if (size, kind) not in self._graphs:
            self._graphs[size, kind] = self._capture(size, kind)
        self._graphs[size, kind].replay()

    def clear(self) -> None:
        """Forget all graphs: something they remember has moved."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one went with its last graph

    def _capture(self, size: int, kind: Kind) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in self._state(kind)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):  # kernels are compiled and libraries set up
                self._run(size, kind)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._run(size, kind)
        for tensor, before in zip(self._state(kind), kept, strict=True):
            tensor.copy_(before)
        return graph


def batch_sizes(max_rows: int) -> list[int]:
    """8, 12, 16, 24, 32, 48, ... up to the most rows there are: at most a third runs in vain."""
    sizes, size = [], SMALLEST
    while size < max_rows:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]
