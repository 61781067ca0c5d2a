"""Continuous batching over the trainer's own weights, one step at a time.

    add -> waiting -> [prefill: a prompt runs once for all its samples] -> rows -> ended
              ^                                                             |
              +---------- preempted, or the weights changed: recompute -----+

A step admits waiting groups and then gives every running row up to `tokens_per_step` tokens; only
then does the host look at them. Everything runs on the calling thread and nothing is locked: a
thread of its own is what `NativeEngine` adds. With `tp_group`, ranks hold one model together: each
has a core, and all must make the same calls in the same order (`lockstep`).
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from verl.models.exact import exact_capacity
from verl.models.fp8 import Fp8Linears
from verl.models.kernels.availability import can_run_triton
from verl.models.routing import Routing
from verl.models.tensor_parallel import load_weights, shard_model
from verl.workers.rollout.base import GenerationRequest
from verl.workers.rollout.native.attention import PrefillSequence, portions
from verl.workers.rollout.native.batch import Batch, RunningBatch, StepOutput
from verl.workers.rollout.native.cache import slots_or_pages
from verl.workers.rollout.native.model_runner import ModelRunner, RouteKeeper
from verl.workers.rollout.native.scheduler import Scheduler
from verl.workers.rollout.native.sequence import (
    EngineLimits,
    Group,
    KnownTokens,
    RunningRequest,
    Sample,
    build_groups,
    tokens_until_stop,
)
from verl.workers.rollout.native.sessions import SessionStore

logger = logging.getLogger(__name__)


class EngineCore:
    """Continues prompts with `module`; `version` counts the updates that its weights have seen.

    With `tp_group`, `module` is a copy of the whole model for this engine alone, which is sharded
    over the ranks of the group here; with `spreads_experts` each rank has whole experts.
    """

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
        """With `keeps_cache`, keys and values computed with older weights are used on.

        `quantization` "fp8" generates with quantized linear layers, which take memory of their own
        beside the cache. With `records_routes` outputs say which experts each token used; steps are
        then plain torch, which is slow on a GPU. `kv_cache_dtype` "fp8" keeps keys and values in
        e4m3, with which twice as many fit.
        """
        self.keeps_cache = keeps_cache
        self.eos_token_ids = frozenset(eos_token_ids)
        if tp_group is not None:
            shard_model(module, tp_group, spreads_experts=spreads_experts)
        self.runner = ModelRunner(module, tp_group)
        if kv_cache_dtype == "fp8":
            refuse_exact(module, "rollout.kv_cache_dtype")
            self.runner.cache_dtype = torch.float8_e4m3fn
        self.quantized = None if quantization is None else quantize(module, quantization)
        if self.quantized is not None:
            num_bytes = max(1, limits.max_cache_bytes - self.quantized.num_bytes)
            limits = replace(limits, max_cache_bytes=num_bytes)
        self.limits = limits
        if records_routes:
            self.runner.recorder = route_keeper(module)
        self.batch = build_batch(self.runner, limits)
        self.cache = self.batch.cache
        self.scheduler = Scheduler(
            self.batch.num_rows, limits.max_prefill_tokens, self.batch.budget
        )
        self.sessions = SessionStore(limits.max_session_bytes, self.batch.budget.release)
        self.batch.let_evict(self.sessions.evict)
        self.num_prefilled_tokens = 0  # all that were admitted, except those known from sessions
        self.num_preempted = 0  # samples that had to free their memory for older ones
        self._version = version
        self._decode_text = decode_text
        self._fresh_seeds = itertools.count(seed)
        self._weights = (-1, -1)  # none have been used
        self._ended: list[Sample] = []

    @property
    def policy_version(self) -> int:
        return self._version()

    @property
    def cache_usage(self) -> float:
        """Share of the memory for keys and values that running sequences and sessions hold."""
        return self.batch.budget.usage(len(self.scheduler.rows))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.groups or self.scheduler.waiting)

    def add(self, request: GenerationRequest) -> RunningRequest:
        """Queue a request; ValueError if it cannot run."""
        seed, num_tokens = request.params.seed, len(request.prompt_ids)
        running = build_groups(
            request,
            self.limits,
            num_slots=self.batch.budget.most_samples(num_tokens, request.params.max_tokens),
            max_shared=self.batch.budget.most_shared(num_tokens),
            seed=next(self._fresh_seeds) if seed is None else seed,
            vocabulary=self.runner.vocabulary,
            eos_token_ids=self.eos_token_ids,
            can_decode_text=self._decode_text is not None,
        )
        for group in running.groups:
            self.scheduler.add(group)
            if group.session_id is not None:
                self.sessions.touch(group.session_id)
        return running

    def step(self) -> None:
        """Admit what fits, then give every running sequence up to `tokens_per_step` tokens.

        If that fails, all requests are dropped with the error and the engine is as new.
        """
        try:
            self.wake_up()
            self._follow_weights()
            admitted = self.scheduler.admit(self.sessions)
            self.batch.relocate(admitted)
            samples = iter([sample for group in admitted for sample in group.unfinished])
            sequences = [sequence for group in admitted for sequence in self._sequences(group)]
            outputs: list[StepOutput] = []
            # The first tokens of admitted groups; in several passes if groups come back long.
            for portion in portions(sequences, self.limits.max_prefill_tokens):
                of_portion = [next(samples) for sequence in portion for _ in sequence.slots]
                outputs += self.batch.prefill(of_portion, portion, len(self.scheduler.groups))
            self.num_prefilled_tokens += sum(sequence.num_new for sequence in sequences)
            self._collect(outputs)
            self._reserve_memory()
            if self.scheduler.rows:
                self._collect(self.batch.decode(self.scheduler.rows))
        except BaseException as error:
            self._drop_all(error)
            raise

    def flush(self) -> None:
        """Wait for the tokens that have been started; their samples have them then."""
        self._collect(self.batch.flush())

    def take_ended(self) -> list[Sample]:
        """The samples that have ended since the last call, aborted ones included."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: str) -> None:
        """End the requests of that name with the tokens they have."""
        groups = self.scheduler.unfinished
        self.abort_groups([group for group in groups if group.request.request_id == request_id])

    def abort_groups(self, groups: Sequence[Group]) -> None:
        for group in groups:
            samples = group.unfinished
            for sample in samples:
                sample.output.stop_reason = "abort"
            self.scheduler.withdraw(group)
            self._end(samples)

    def close_session(self, session_id: str) -> None:
        self.sessions.close(session_id)
        self.scheduler.close_session(session_id)

    def sleep(self) -> None:
        num_unfinished = len(self.scheduler.unfinished)
        if num_unfinished:
            raise RuntimeError(
                f"{num_unfinished} requests are not finished; await or abort them before sleep()"
            )
        self.batch.flush()  # nobody waits for it, but it writes into the cache
        self.sessions.clear()
        self.cache.free()

    def wake_up(self) -> None:
        if self.runner.device.type != "cpu":  # there, slots are made as sequences come
            self.cache.reserve(self.cache.max_slots, self.cache.max_slots)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors, under their Hugging Face names, into an engine's own copy.

        Sequences that run go on with the new weights at the next step.
        """
        load_weights(self.runner.module, weights)

    # ---- one step ----------------------------------------------------------------------------

    def _reserve_memory(self) -> None:
        """Give all rows memory for the next steps; the youngest group is preempted if need be."""
        if self.batch.reserve(self.scheduler.rows):
            return
        self._collect(self.batch.flush())  # some may have ended
        while not self.batch.reserve(self.scheduler.rows):
            self._preempt(self.scheduler.youngest)

    def _preempt(self, group: Group) -> None:
        """Free the memory of a running group, which is admitted again when it fits."""
        if not self.num_preempted:
            logger.warning(
                "the memory for keys and values is full: request %s waits, and its tokens so far "
                "are computed again. This is said once and counted (num_preempted of a response); "
                "rollout.gpu_memory_utilization gives more memory",
                group.request.request_id,
            )
        samples = group.unfinished
        for sample in samples:
            sample.output.num_preempted += 1
        self.num_preempted += len(samples)
        self._leave(samples, [group])
        self.scheduler.requeue(group)

    def _follow_weights(self) -> None:
        """Recompute keys and values that belong to other weights than the current ones, unless
        they are to be kept."""
        weights = (self.policy_version, self.runner.num_weight_writes)
        if weights == self._weights:
            return
        self.flush()  # what is in flight was computed with the old ones
        self._weights = weights
        if self.quantized is not None:
            self.quantized.refresh(self.runner.run_tokens)
        if self.keeps_cache:
            return
        self.sessions.clear()
        for row in self.scheduler.rows:
            row.output.num_preempted += 1
        self.scheduler.requeue_running()

    def _sequences(self, group: Group) -> list[PrefillSequence]:
        """The prompt, once for all samples; or every sample whole, if they have run before."""
        samples = group.unfinished
        if group.has_tokens:
            return [
                PrefillSequence(
                    token_ids=sample.token_ids,
                    num_shared=group.num_shared,
                    prompt_slot=group.slot,
                    slots=[sample.slot],
                    media=group.media,
                    fills_prompt=sample is samples[0],
                )
                for sample in samples
            ]
        known, group.known = group.known, KnownTokens()
        return [
            PrefillSequence(
                token_ids=group.prompt_ids,
                num_shared=group.num_shared,
                prompt_slot=group.slot,
                slots=[sample.slot for sample in samples],
                media=group.media,
                known=known,
            )
        ]

    def _collect(self, outputs: Sequence[StepOutput]) -> None:
        """Append new tokens to their responses, and take out the samples that have ended."""
        version, now, ended = self._weights[0], time.monotonic(), []
        for new in outputs:
            if new.sample.output.stop_reason:  # it ended earlier in the same outputs
                continue
            if not math.isfinite(sum(new.log_probs)):
                raise FloatingPointError(
                    f"request {new.sample.group.request.request_id} got log-probabilities "
                    f"{new.log_probs} from version {version} of the weights; they have diverged: "
                    "go back to a checkpoint and lower the learning rate"
                )
            output = new.sample.output
            if not output.token_ids:
                output.first_token_seconds = now - new.sample.group.owner.arrived_at
            output.token_ids += new.token_ids
            output.log_probs += new.log_probs
            output.policy_versions += [version] * len(new.token_ids)
            if new.is_done or new.sample.group.request.params.stop:
                output.stop_reason = self._stop_reason(new)
                if output.stop_reason:
                    ended.append(new.sample)
        self._end(ended)

    def _stop_reason(self, new: StepOutput) -> str:
        """Why the sample has ended, or ""; tokens behind the end of a stop text are cut off."""
        group, output = new.sample.group, new.sample.output
        if group.request.params.stop:
            assert self._decode_text is not None  # refused in build_groups
            response = group.sampled_ids + output.token_ids
            end = tokens_until_stop(
                response, len(new.token_ids), group.request.params.stop, self._decode_text
            )
            if end is not None:
                end -= len(group.sampled_ids)
                for column in (output.token_ids, output.log_probs, output.policy_versions):
                    del column[end:]
                return "stop"
        if not new.is_done:
            return ""
        if output.token_ids[-1] in group.stop_token_ids:
            return "stop"
        if len(output.token_ids) != group.token_limit:
            raise RuntimeError(
                f"a response of request {group.request.request_id} ended after "
                f"{len(output.token_ids)} of {group.token_limit} tokens without a stop token: this "
                "is a fault of the engine, and its responses cannot be trusted"
            )
        return "length"

    def _end(self, samples: Sequence[Sample]) -> None:
        """Take out samples that have their stop reason, and groups that have no others left."""
        for sample in samples if self.runner.recorder is not None else ():
            if sample.routes:
                routes = torch.cat(sample.routes)[: len(sample.token_ids) - 1]
                sample.output.routed_experts = routes.numpy()
        rows = sorted((s for s in samples if s.slot >= 0), key=lambda sample: sample.slot)
        for row in rows:
            self._keep_for_session(row)
        groups = []
        for sample in samples:
            group = sample.group
            group.num_ended += 1
            if group.is_finished and group.slot >= 0:
                groups.append(group)
        groups.sort(key=lambda group: group.slot)
        self._leave(rows, groups)
        self._ended += samples

    def _leave(self, rows: Sequence[Sample], groups: Sequence[Group]) -> None:
        """Take rows out, and groups that have no others."""
        moves = []
        for row in rows:
            move = self.scheduler.leave(row)
            if move is not None:
                moves.append((move, self.scheduler.rows[move.target]))
        self.batch.move_rows(moves)
        for group in groups:
            move = self.scheduler.leave_group(group)
            if move is not None:
                self.batch.move_group(move, self.scheduler.groups[move.target])

    def _keep_for_session(self, row: Sample) -> None:
        if row.session_id is None or not row.num_tokens:
            return
        self.sessions.put(row.session_id, self.batch.keep(row))

    def _drop_all(self, error: BaseException) -> None:
        """Forget all requests; they have the error."""
        for group in self.scheduler.unfinished:
            group.owner.error = error
            for sample in group.unfinished:
                sample.output.stop_reason = "abort"
            group.num_ended = len(group.samples)
        self.sessions.clear()
        self.scheduler.clear()
        self.batch.flush()
        self.batch.reset()
        self.cache.free()  # what is in it may be half-written, or not finite


def quantize(module: PreTrainedModel, quantization: str) -> Fp8Linears:
    if quantization != "fp8":
        raise ValueError(
            f"rollout.quantization is {quantization}; the built-in engine quantizes to fp8: set "
            "rollout.quantization=fp8 or null"
        )
    refuse_exact(module, "rollout.quantization")
    return Fp8Linears(module)


def refuse_exact(module: PreTrainedModel, key: str) -> None:
    if exact_capacity(module) is not None:
        raise ValueError(
            f"{key} is fp8, and the model is exact; rounded numbers are not those of training: set "
            "rollout.exact=False or leave it out"
        )


def route_keeper(module: PreTrainedModel) -> RouteKeeper:
    routing = Routing.of(module)
    if routing is None:
        raise ValueError(
            f"rollout.enable_rollout_routing_replay is True, but {type(module).__name__} has no "
            "experts whose routes could be recorded: leave it out"
        )
    device = next(module.parameters()).device
    if can_run_triton(device):
        logger.warning(
            "expert routes are recorded by plain torch, without graphs and kernels: slow. In exact "
            "mode routers agree without replay (rollout.exact=True)"
        )
    return RouteKeeper(len(routing.layers))


def build_batch(runner: ModelRunner, limits: EngineLimits) -> Batch:
    """Through kernels where there are some; plain torch is exact and runs anywhere."""
    has_kernels = runner.exact_capacity is None and can_run_triton(runner.device)
    if has_kernels and runner.recorder is None:
        from verl.workers.rollout.native.kernel_batch import (  # noqa: PLC0415 (Triton)
            KernelBatch,
            PagedBatch,
        )

        size = slots_or_pages(runner.slot_shape(limits), limits, runner.tp_group)
        return (PagedBatch if size.is_paged else KernelBatch)(runner, limits, size)
    return RunningBatch(runner, limits)
