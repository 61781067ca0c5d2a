"""A step captured once per batch size and replayed: one launch instead of hundreds. CUDA only."""

from collections.abc import Callable

import torch

NUM_WARM_UPS = 2
SMALLEST = 8


class StepGraphs:
    """Replays `run(num_rows)` on at least as many rows as asked for.

    `run` may touch only memory that outlives it or is freed inside it, and must do no harm when it
    runs on rows that nobody uses. `state` are the tensors it changes; capturing leaves them as they
    were.
    """

    def __init__(
        self, run: Callable[[int], None], state: Callable[[], list[torch.Tensor]], max_rows: int
    ) -> None:
        self._run = run
        self._state = state
        self._sizes = batch_sizes(max_rows)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, num_rows: int) -> None:
        size = next(size for size in self._sizes if size >= num_rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        self._graphs[size].replay()

    def clear(self) -> None:
        """Forget all graphs: something they remember has moved."""
        self._graphs.clear()

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):  # kernels are compiled and libraries set up
                self._run(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(size)
        for tensor, before in zip(self._state(), kept, strict=True):
            tensor.copy_(before)
        return graph


def batch_sizes(max_rows: int) -> list[int]:
    """8, 12, 16, 24, 32, 48, ... up to the most rows there are: at most a third runs in vain."""
    sizes, size = [], SMALLEST
    while size < max_rows:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]
