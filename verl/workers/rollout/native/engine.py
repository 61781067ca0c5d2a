"""The built-in rollout engine: an `EngineCore` that steps on a thread of its own.

    submit, abort, close_session --> engine thread: step, step, step, ... --> futures, on_end
    sleep, wake_up, update_weights: between two steps, on the caller's thread

So a coroutine never waits for a decode step, and code that blocks an event loop does not stop
decoding. Futures are resolved together at the end of a step. A step that fails drops all requests:
their futures raise `LostRequestError`, and the engine can be used again. The tokens of a sequence
depend on its seed and the weights alone, never on what the threads do meanwhile.

Ranks that hold one model together (`tp_group`) must make the same steps, so there the thread is not
used: `polling.SteppedPoller` and `generate_batch` step the core on the caller's thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from verl.workers.rollout.base import (
    GenerationRequest,
    OnEnd,
    StreamingRollout,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.native.sequence import (
    EngineLimits,
    LostRequestError,
    NewTokens,
    RunningRequest,
)
from verl.workers.rollout.stepping import DeltaFeed, EngineThread, Submission

__all__ = ["EngineLimits", "LostRequestError", "NativeEngine"]


class NativeEngine(StreamingRollout):
    """Continues prompts with `module`; the arguments are those of `EngineCore`."""

    def __init__(
        self,
        module: PreTrainedModel,
        limits: EngineLimits,
        *,
        eos_token_ids: Sequence[int],
        version: Callable[[], int] = lambda: 0,
        decode_text: Callable[[list[int]], str] | None = None,
        seed: int = 0,
        tp_group: ProcessGroup | None = None,
        spreads_experts: bool = False,
        keeps_cache: bool = False,
        quantization: str | None = None,
        records_routes: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.core = EngineCore(
            module,
            limits,
            eos_token_ids=eos_token_ids,
            version=version,
            decode_text=decode_text,
            seed=seed,
            tp_group=tp_group,
            spreads_experts=spreads_experts,
            keeps_cache=keeps_cache,
            quantization=quantization,
            records_routes=records_routes,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.limits = limits
        self._submissions: dict[RunningRequest, Submission] = {}
        self._streams: dict[RunningRequest, NewTokens] = {}
        self._thread = EngineThread(
            self, NativeEngine._step, name="native engine", device=self.core.runner.device
        )

    @property
    def policy_version(self) -> int:
        return self.core.policy_version

    @property
    def cache_usage(self) -> float:
        return self.core.cache_usage

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks hold the model together and step in lockstep."""
        return self.core.runner.tp_group is not None

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        return self._submit(request, on_end, None)

    def _submit(
        self,
        request: GenerationRequest,
        on_end: OnEnd | None,
        on_delta: Callable[[TokenDelta], None] | None,
    ) -> Future[list[TokenOutput]]:
        if self.is_sharded:
            raise RuntimeError(
                "ranks that hold one model together step in lockstep: use generate_batch, or a "
                "SteppedPoller on every rank"
            )
        return self._thread.submit(
            request, on_end, NativeEngine._add, NativeEngine._cancel, on_delta
        )

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        feed = DeltaFeed(asyncio.get_running_loop())
        future = self._submit(request, None, feed.put)
        future.add_done_callback(lambda done: feed.put(None))
        try:
            while (delta := await feed.next()) is not None:
                yield delta
            future.result(timeout=0)  # it is done; an error is raised here
        finally:
            future.cancel()

    def together(self) -> AbstractContextManager[None]:
        return self._thread.together()

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[TokenOutput]]:
        """Steps on the caller's thread, which waits anyway; submitted requests run along."""
        running: list[RunningRequest] = []
        with self.paused():
            try:
                for request in requests:
                    running.append(self.core.add(request))
                while not all(one.is_finished for one in running):
                    self._thread.run_commands()
                    self._step()
                    for one in running:
                        if one.error is not None:
                            raise one.error
            finally:
                self.core.abort_groups([group for one in running for group in one.groups])
                self._deliver()
        return [one.outputs for one in running]

    def abort(self, request_id: str) -> None:
        self._thread.post(NativeEngine._abort, request_id)

    def close_session(self, session_id: str) -> None:
        self._thread.post(NativeEngine._close_session, session_id)

    def paused(self) -> AbstractContextManager[None]:
        """Between two steps: while the context lasts no step begins, and the weights may change."""
        return self._thread.paused()

    def sleep(self) -> None:
        with self.paused():
            self.core.sleep()

    def wake_up(self) -> None:
        with self.paused():
            self.core.wake_up()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors, under their Hugging Face names, into an engine's own copy.

        Sequences that run go on with the new weights at the next step.
        """
        with self.paused():
            self.core.update_weights(weights)

    def close(self) -> None:
        """End the thread; unfinished requests are dropped, and new ones are refused."""
        self._thread.close()
        with self.paused():
            self._fail_all(RuntimeError("the engine was closed"))
            self.core.abort_groups(self.core.scheduler.unfinished)

    # ---- between steps, posted by other threads --------------------------------------------------

    def _add(self, submission: Submission) -> None:
        if submission.future.cancelled():
            return
        try:
            running = self.core.add(submission.request)
        except ValueError as refusal:
            submission.fail(refusal)
        else:
            self._submissions[running] = submission
            if submission.on_delta is not None:
                self._streams[running] = NewTokens(running)

    def _cancel(self, future: Future[list[TokenOutput]]) -> None:
        for running, submission in list(self._submissions.items()):
            if submission.future is future:
                self.core.abort_groups(running.groups)
        self._deliver()

    def _abort(self, request_id: str) -> None:
        self.core.abort(request_id)
        self._deliver()

    def _close_session(self, session_id: str) -> None:
        self.core.close_session(session_id)

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step, if there is anything to do. True if there is more.

        An error that makes it fail becomes that of every request.
        """
        if self.core.has_unfinished:
            try:
                self.core.step()
            except BaseException as error:
                self._deliver()
                self._fail_all(error)
                if not isinstance(error, Exception):
                    raise
            self._deliver()
        return self.core.has_unfinished

    def _deliver(self) -> None:
        """Tell of new tokens to who listens and of the samples that have ended, and resolve the
        futures of complete requests."""
        for running, new in list(self._streams.items()):
            on_delta = self._submissions[running].on_delta
            if on_delta is not None and running.error is None:
                for delta in new.take():
                    on_delta(delta)
        complete = []
        for sample in self.core.take_ended():
            running = sample.group.owner
            submission = self._submissions.get(running)
            if submission is not None:
                submission.end(sample.index, sample.output)
                if submission.is_complete:
                    complete.append(self._submissions.pop(running))
                    self._streams.pop(running, None)
        for submission in complete:
            submission.resolve()

    def _fail_all(self, error: BaseException) -> None:
        submissions, self._submissions = self._submissions, {}
        self._streams.clear()
        for running, submission in submissions.items():
            loss = running.loss(error)
            loss.__cause__ = error
            submission.fail(loss)
