"""The ways in which weights come into the engine's process.

The parent says which before the first byte: memory that both see (its end of a pipe comes along),
memory of a GPU that both see (likewise), or a TCP port on which somebody else will send. A way
carries one update and is closed after it, so nothing of an earlier one can come later.
"""

import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from verl.workers.rollout.process.wire import Message
from verl.workers.weight_sync.bucket import ChannelError, Published
from verl.workers.weight_sync.channel import ReceivingChannel
from verl.workers.weight_sync.cuda_ipc import CudaIpcReceiver
from verl.workers.weight_sync.shared_memory import SharedMemoryReceiver
from verl.workers.weight_sync.streaming import LoadWeights, stream_weights
from verl.workers.weight_sync.tcp import TcpListener, TcpReceiver

SHARED_MEMORY, CUDA_IPC, TCP = "shared_memory", "cuda_ipc", "tcp"

Weights = Iterable[tuple[str, Tensor]]


class IncomingWeights:
    """Opened by `accept`, used up by `receive`; `progressed` is called for every tensor."""

    def __init__(self, progressed: Callable[[], None]) -> None:
        self._progressed = progressed
        self._pipe: Connection[Any, Any] | None = None
        self._listener: TcpListener | None = None
        self._options: Message = {}
        self._wait_seconds = 0.0

    def accept(self, call: Message) -> list[Any] | None:
        """Get ready; for TCP, where a sender that knows the token finds this process."""
        self.close()
        self._options = call
        if call["way"] == TCP:
            try:
                self._listener = TcpListener(call["token"], host=call["host"])
            except OSError as error:
                raise ChannelError(f"cannot listen on {call['host']!r}: {error}") from error
            return [self._listener.host, self._listener.port]
        self._pipe = Connection(call["descriptor"])
        return None

    def receive(self, load: LoadWeights) -> tuple[Published, float]:
        """One update, given to `load` tensor by tensor; raises unless it was whole.

        Also the seconds that `load` took apart from waiting for tensors.
        """
        tcp: TcpReceiver | None = None
        seconds = 0.0

        def timed_load(weights: Weights) -> None:
            nonlocal seconds
            start, self._wait_seconds = time.perf_counter(), 0.0
            load(self._observed(weights))
            seconds = time.perf_counter() - start - self._wait_seconds

        try:
            if self._listener is not None:
                tcp = self._listener.accept(
                    max_bucket_bytes=self._options["bucket_bytes"],
                    timeout_seconds=self._options["timeout_seconds"],
                )
            return stream_weights(tcp or self._local(), timed_load), seconds
        finally:
            if tcp is not None:
                tcp.close()
            self.close()

    def close(self) -> None:
        for end in (self._pipe, self._listener):
            if end is not None:
                end.close()
        self._pipe = self._listener = None

    def _observed(self, weights: Weights) -> Weights:
        stream, asked = iter(weights), time.perf_counter()
        for named in stream:
            self._wait_seconds += time.perf_counter() - asked
            self._progressed()
            yield named
            asked = time.perf_counter()
        self._wait_seconds += time.perf_counter() - asked

    def _local(self) -> ReceivingChannel:
        if self._pipe is None:
            raise ChannelError("no way for weights is open: accept_weights comes first")
        timeout = self._options["timeout_seconds"]
        if self._options["way"] == CUDA_IPC:
            return CudaIpcReceiver(self._pipe, timeout_seconds=timeout)
        return SharedMemoryReceiver(self._pipe, timeout_seconds=timeout)
