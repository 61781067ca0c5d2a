"""Many engines as one: load balancing, sticky sessions, loss, restart and retry.

    submit --> engine with the fewest outstanding tokens --> Future of all samples
                 |  (or the one that holds the beginning of the prompt, if it is about as free)
                 +-- EngineLostError --> out of service; `recover` runs on a thread, one engine
                 |                       at a time; the request is retried on any other engine
                 +-- no engine left ---> the request is held until one is back, or none can be

Agent loops, the server and batch generation share this class. It may be called from any thread and
any event loop: a lock guards the bookkeeping and is never held while an engine is called. A retried
sample has the seed it had before; one that was reported through `on_end` is reported once. What was
aborted is never retried. Engines may join (`add`) and leave (`retire`) meanwhile.
"""

import asyncio
import dataclasses
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing

from verl.utils.exposition import Family
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    Rollout,
    StreamingRollout,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.fleet_load import Job, Slot, fleet_families
from verl.workers.weight_sync.bucket import WeightsNotReadyError

Recover = Callable[[Rollout], None]
"""Restarts a lost engine with the current weights; returns when it can serve."""

MAX_ATTEMPTS = 3
MAX_STICKY = 10_000
PREFIX_TOKENS = 64
"""Requests without a session that share so many first tokens prefer one engine."""

logger = logging.getLogger(__name__)


class Fleet:
    """Continues prompts on `engines`.

    `recover` restarts a lost engine; without it, and after `max_restarts` restarts in a row between
    which no request was finished, an engine stays out of service. A request is given to an engine
    at most `max_attempts` times. Keeping keys and values for the next turn of a session costs a
    copy per response, so engines are told of sessions from the first second turn on, or from the
    start with `keep_sessions`.
    """

    def __init__(
        self,
        engines: Sequence[Rollout],
        *,
        recover: Recover | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        max_restarts: int | None = None,
        max_sticky: int = MAX_STICKY,
        keep_sessions: bool = False,
    ) -> None:
        if not engines:
            raise ValueError("a fleet needs at least one rollout engine")
        self.slots = [Slot(index, engine) for index, engine in enumerate(engines)]
        self.num_redispatched = 0  # samples
        self.num_restarts = 0
        self._recover = recover
        self._max_attempts = max_attempts
        self._max_restarts = max_restarts
        self._max_sticky = max_sticky
        self._keep_sessions = keep_sessions
        self._lock = threading.RLock()
        self._jobs: dict[Job, None] = {}  # all whose future is not resolved, oldest first
        self._held: deque[Job] = deque()  # while every engine is being recovered
        self._slot_of: OrderedDict[Hashable, Slot] = OrderedDict()  # session or prefix -> engine
        self._lost: deque[Slot] = deque()  # waiting for recovery
        self._recovery: threading.Thread | None = None

    @property
    def engines(self) -> list[Rollout]:
        return [slot.engine for slot in self.slots]

    @property
    def outstanding(self) -> list[int]:
        """Tokens that each engine may still have to compute."""
        return [slot.outstanding for slot in self.slots]

    @property
    def can_stream(self) -> bool:
        """Whether every engine delivers tokens while a request runs."""
        return all(isinstance(slot.engine, StreamingRollout) for slot in self.slots)

    def engine_of(self, session_id: str) -> int | None:
        """Index of the engine that served the session last."""
        slot = self._slot_of.get(session_id)
        return None if slot is None else slot.index

    # ---- requests --------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> "Future[list[TokenOutput]]":
        """Continue a prompt; cancelling the future aborts the request on its engine."""
        job = Job(request, on_end)
        with self._lock:
            self._jobs[job] = None
        job.future.add_done_callback(lambda future: self._forget(job))
        self._dispatch(job)
        return job.future

    async def generate(self, request: GenerationRequest) -> list[TokenOutput]:
        return await asyncio.wrap_future(self.submit(request))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yield tokens as they come. EngineLostError if no engine is in service, or if the engine
        is lost after the first tokens; before them, the request is retried."""
        job = Job(request, None, is_submitted=True)
        with self._lock:
            self._jobs[job] = None
        try:
            async with aclosing(self._stream(job)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._forget(job)

    async def _stream(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        request = job.request
        while True:
            if not self._assign(job):
                raise self._all_lost() or EngineLostError("no rollout engine is in service")
            assert job.slot is not None
            engine, begun = job.slot.engine, set[int]()  # samples that have tokens
            assert isinstance(engine, StreamingRollout), f"{type(engine).__name__} cannot stream"
            try:
                async with aclosing(engine.stream(self._sent(request))) as deltas:  # pyright: ignore[reportArgumentType]
                    async for delta in deltas:
                        is_first = delta.sample not in begun and bool(delta.token_ids)
                        begun.add(delta.sample)
                        waited = time.monotonic() - job.submitted_at if is_first else None
                        self._discharge(job, len(delta.token_ids))
                        self._count(job, len(delta.token_ids), delta.stop_reason, waited)
                        yield delta
                self._release(job, None)
                return
            except EngineLostError as error:
                if not self._should_retry(job, error, is_retriable=not begun):
                    raise
            finally:
                self._release(job, None, has_finished=False)

    def abort(self, request_ids: str | Collection[str] | None = None) -> None:
        """End these requests, or all: each sample that has not ended gets the tokens it has and the
        stop reason "abort". Those that no engine has yet, or whose engine is lost, have none.

        Does not wait; the futures resolve when the engines have heard of it. Unknown names are no
        error: a request may have ended meanwhile.
        """
        with self._lock:
            jobs = list(self._jobs)
            if request_ids is not None:
                names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
                jobs = [job for job in jobs if job.request.request_id in names]
            for job in jobs:
                job.is_aborted = True
            held = [job for job in self._held if job.is_aborted]
            self._held = deque(job for job in self._held if not job.is_aborted)
        for job in held:
            self._end_aborted(job)
        for job in jobs:
            with job.submitting:
                slot = job.slot
                if slot is not None and job.is_submitted and not job.knows_abort:
                    job.knows_abort = True
                    slot.engine.abort(job.request.request_id)

    def close_session(self, session_id: str) -> None:
        """Let the engine of the session drop what it keeps for it."""
        with self._lock:
            slot = self._slot_of.pop(session_id, None)
        if slot is not None:
            slot.engine.close_session(session_id)

    # ---- all engines -----------------------------------------------------------------------------

    def versions(self) -> set[int]:
        """Policy versions of all engines; empty if one is lost, or has none since it restarted."""
        try:
            return {slot.engine.policy_version for slot in self.slots}
        except (EngineLostError, WeightsNotReadyError):
            return set()

    def num_in_service(self) -> int:
        """Number of engines that serve; an engine found dead is recovered."""
        for slot in self.slots:
            if not slot.is_lost and not slot.engine.is_alive():
                self._lose(slot, slot.num_losses, EngineLostError("its process has ended"))
        return sum(slot.is_serving for slot in self.slots)

    def add(self, engine: Rollout) -> None:
        """An engine with the weights of the others joins them."""
        with self._lock:
            index = 1 + max((slot.index for slot in self.slots), default=-1)
            self.slots = [*self.slots, Slot(index, engine)]
        self._dispatch_held()

    def retire(self, engine: Rollout) -> bool:
        """Give an engine no further requests; True once it has none and is forgotten."""
        with self._lock:
            (slot,) = (slot for slot in self.slots if slot.engine is engine)
            slot.is_leaving = True
            if not slot.num_running:
                self.slots = [other for other in self.slots if other is not slot]
                for name in [n for n, holder in self._slot_of.items() if holder is slot]:
                    del self._slot_of[name]
            return not slot.num_running

    def close(self) -> None:
        """Recover no engine any more; engines are closed by whoever started them."""
        with self._lock:
            self._recover = None
            self._lost.clear()

    # ---- dispatch --------------------------------------------------------------------------------

    def _dispatch(self, job: Job) -> None:
        if job.future.cancelled():
            return
        with self._lock:
            is_aborted = job.is_aborted
            is_held = not is_aborted and not self._assign(job)
            if is_held:
                self._held.append(job)
            failure = self._all_lost() if is_held else None
        if failure is not None:
            self._dispatch_held()  # fails it, with all others
        if is_aborted:
            self._end_aborted(job)
        if is_aborted or is_held:
            return
        assert job.slot is not None
        logger.debug(
            "request of %d tokens, %d samples: to engine %d",
            len(job.request.prompt_ids), job.request.num_samples, job.slot.index,
        )  # fmt: skip
        try:
            with job.submitting:
                engine = job.slot.engine
                job.outputs = engine.submit(
                    self._sent(job.request), lambda *sample: self._end_sample(job, *sample)
                )
                job.is_submitted = True
                if job.is_aborted:
                    job.knows_abort = True
                    engine.abort(job.request.request_id)
        except Exception as error:
            self._end(job, error)
            return
        job.outputs.add_done_callback(lambda outputs: self._end(job, error_of(outputs)))
        self._abort_cancelled(job)

    def _dispatch_held(self) -> None:
        """Submit what was held; fail it if no engine will come back."""
        with self._lock:
            held, self._held = self._held, deque()
            failure = self._all_lost()
        for job in held:
            if failure is None:
                self._dispatch(job)
            elif job.future.set_running_or_notify_cancel():
                job.future.set_exception(failure)

    def _assign(self, job: Job) -> bool:
        """Give the job to an engine; False if none is in service."""
        request = job.request
        session = request.session_ids[0] if request.session_ids else None
        key = session or tuple(request.prompt_ids[:PREFIX_TOKENS])
        with self._lock:
            self._keep_sessions |= not job.num_attempts and session in self._slot_of
            serving = [slot for slot in self.slots if slot.is_serving]
            if not serving:
                return False
            slot = min(serving, key=lambda slot: slot.outstanding)
            previous = self._slot_of.get(key, slot)
            # Computing the prompt elsewhere costs as much as waiting for so many tokens.
            slack = len(request.prompt_ids)
            if previous.is_serving and previous.outstanding <= slot.outstanding + slack:
                slot = previous
            for name in request.session_ids or (key,):
                self._slot_of[name] = slot
                self._slot_of.move_to_end(name)
            while len(self._slot_of) > self._max_sticky:
                self._slot_of.popitem(last=False)
            job.slot, job.num_losses = slot, slot.num_losses
            job.num_attempts += 1
            job.outstanding = len(request.prompt_ids)
            job.outstanding += request.num_samples * request.params.max_tokens
            slot.outstanding += job.outstanding
            slot.num_running += 1
            slot.num_requests += 1
            slot.num_prompt_tokens += len(request.prompt_ids)
        return True

    def _sent(self, request: GenerationRequest) -> GenerationRequest:
        has_sessions = self._keep_sessions or request.session_ids is None
        return request if has_sessions else dataclasses.replace(request, session_ids=None)

    def _discharge(self, job: Job, num_tokens: int) -> None:
        """Count tokens as computed, or as no longer to come."""
        with self._lock:
            num_tokens = min(num_tokens, job.outstanding)
            job.outstanding -= num_tokens
            if job.slot is not None:
                job.slot.outstanding -= num_tokens

    def _release(self, job: Job, error: BaseException | None, has_finished: bool = True) -> None:
        """Take the job from its engine, once per attempt."""
        with self._lock:
            slot, job.slot = job.slot, None
            if slot is None:
                return
            slot.outstanding -= job.outstanding
            slot.num_running -= 1
            if has_finished and error is None:
                slot.num_unproductive_restarts = 0
                slot.seconds.add(time.monotonic() - job.submitted_at)

    def _count(
        self, job: Job, num_tokens: int, stop_reason: str, first_token_seconds: float | None
    ) -> None:
        with self._lock:
            if job.slot is not None:
                if first_token_seconds is not None:
                    job.slot.first_token.add(first_token_seconds)
                job.slot.num_generated_tokens += num_tokens
                job.slot.ended.update([stop_reason] if stop_reason else ())

    def families(self, model_name: str = "") -> list[Family]:
        """What engines do now and have done, for Prometheus: `vllm:` names are those of vLLM's
        dashboards, with its meaning; each sample of a prompt is a request there."""
        with self._lock:
            running = Counter[int]()
            for job in self._jobs:
                if job.slot is not None:
                    running[job.slot.index] += job.request.num_samples - len(job.ended)
            waiting = sum(job.request.num_samples for job in self._held)
            return fleet_families(self.slots, running, waiting, self.num_redispatched, model_name)

    # ---- ends ------------------------------------------------------------------------------------

    def _end_sample(self, job: Job, sample: int, output: TokenOutput) -> None:
        self._discharge(job, job.request.params.max_tokens)
        self._count(job, len(output.token_ids), output.stop_reason, output.first_token_seconds)
        if sample not in job.ended and not job.future.cancelled():
            job.ended[sample] = output
            if job.on_end is not None:
                job.on_end(sample, output)

    def _end(self, job: Job, error: BaseException | None) -> None:
        """The engine is through with the job: resolve its future, or retry."""
        if isinstance(error, EngineLostError):
            if self._should_retry(job, error):
                self._dispatch(job)
                return
            if job.is_aborted:
                self._end_aborted(job)
                return
        self._release(job, error)
        if not job.future.set_running_or_notify_cancel():
            return
        if error is not None:
            job.future.set_exception(error)
            return
        assert job.outputs is not None
        outputs = job.outputs.result(timeout=0)
        # A sample that ended before a loss was reported then; the retry must not contradict it.
        job.future.set_result([job.ended.get(n, output) for n, output in enumerate(outputs)])

    def _end_aborted(self, job: Job) -> None:
        """Resolve the future of an aborted job that no engine has."""
        for sample in range(job.request.num_samples):
            if sample not in job.ended:
                self._end_sample(job, sample, TokenOutput(stop_reason="abort"))
        if job.future.set_running_or_notify_cancel():
            job.future.set_result([job.ended[n] for n in range(job.request.num_samples)])

    def _should_retry(self, job: Job, error: EngineLostError, *, is_retriable: bool = True) -> bool:
        """Take the lost engine out of service, and say whether another may have the job."""
        slot = job.slot
        assert slot is not None
        self._release(job, error)
        self._lose(slot, job.num_losses, error)
        is_last = job.num_attempts >= self._max_attempts
        if is_last or not is_retriable or job.is_aborted or job.future.cancelled():
            return False
        with self._lock:
            self.num_redispatched += job.request.num_samples
        logger.info("retry: a request of rollout engine %d goes to another: %s", slot.index, error)
        return True

    def _forget(self, job: Job) -> None:
        with self._lock:
            self._jobs.pop(job, None)
        self._abort_cancelled(job)

    def _abort_cancelled(self, job: Job) -> None:
        with self._lock:
            slot, outputs = job.slot, job.outputs
        if job.future.cancelled() and slot is not None and outputs is not None:
            outputs.cancel()

    # ---- loss and recovery -----------------------------------------------------------------------

    def _lose(self, slot: Slot, num_losses: int, error: EngineLostError) -> None:
        """Take the engine out of service; `num_losses` tells whether this loss is known already."""
        with self._lock:
            if slot.is_lost or slot.num_losses != num_losses:
                return
            logger.warning("rollout engine %d is lost: %s", slot.index, error)
            slot.is_lost = True
            slot.num_losses += 1
            limit = self._max_restarts
            if self._recover is None or slot.num_unproductive_restarts == limit:
                logger.error("rollout engine %d stays lost: %s", slot.index, error)
                slot.failure = error
            else:
                self._lost.append(slot)
                if self._recovery is None:
                    self._recovery = threading.Thread(
                        target=self._recover_lost, name="engine recovery", daemon=True
                    )
                    self._recovery.start()
        if slot.failure is not None:
            self._dispatch_held()

    def _recover_lost(self) -> None:
        """Recover one engine after another: all ranks may take part in each recovery."""
        while True:
            with self._lock:
                recover = self._recover
                if recover is None or not self._lost:
                    self._recovery = None
                    return
                slot = self._lost.popleft()
                slot.num_unproductive_restarts += 1
            failure: BaseException | None = None
            try:
                recover(slot.engine)
            except BaseException as error:  # told to the requests that wait for the engine
                logger.error("rollout engine %d stays lost: %s", slot.index, error)
                failure = error
            else:
                logger.info("retry: rollout engine %d is back", slot.index)
            with self._lock:
                slot.failure = failure
                if failure is None:
                    slot.is_lost = False
                    self.num_restarts += 1
            self._dispatch_held()

    def _all_lost(self) -> EngineLostError | None:
        """The error of those who would wait for ever."""
        staying = [slot for slot in self.slots if not slot.is_leaving]
        failures = [slot.failure for slot in staying if slot.failure is not None]
        if len(failures) < max(1, len(staying)):
            return None
        error = EngineLostError(
            f"all {len(staying)} rollout engines are lost, and none could be restarted: "
            f"{failures[0]}"
        )
        error.__cause__ = failures[0]
        return error


def error_of(outputs: "Future[list[TokenOutput]]") -> BaseException | None:
    return CancelledError() if outputs.cancelled() else outputs.exception(timeout=0)
