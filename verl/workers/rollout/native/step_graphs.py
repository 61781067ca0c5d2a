"""Work captured once per size and kind: one launch instead of hundreds. CUDA only."""

from collections.abc import Callable, Hashable

import torch

HIGH_PRIORITY = -1
NUM_WARM_UPS = 2
FEWEST_ROWS = 8
FEWEST_TOKENS = 64
MANY_TOKENS = 4096
"""From here on tokens in vain cost more than further graphs."""


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


def batch_sizes(max_rows: int) -> list[int]:
    """8, 12, 16, 24, 32, 48, ... up to the most rows there are: at most a third runs in vain."""
    sizes, size = [], FEWEST_ROWS
    while size < max_rows:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]


def prefill_sizes(max_tokens: int) -> list[int]:
    """64, 96, 128, 192, ... 4096, 4608, 5120, ... up to `max_tokens`.

    At most a third runs in vain below 4096 tokens, an eighth above; fewer than 64 count as 64.
    """
    sizes, size = [], FEWEST_TOKENS
    while size < max_tokens:
        sizes += range(size, 2 * size, size // (2 if size < MANY_TOKENS else 8))
        size *= 2
    return [size for size in sizes if size < max_tokens] + [max_tokens]
