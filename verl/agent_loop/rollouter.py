"""`Rollouter`: from prompts to groups of graded trajectories.

    caller's thread                     event loop thread, as long as the process lives
      submit(groups) ------------------>  a task per group: the loops of its samples
      buffer.demands, buffer.take wait    each trajectory is graded as it ends
                          <-------------  buffer.put(group)


What happens to a trajectory follows from its row and its seed, so groups are the same whatever else
runs beside them.
"""

import asyncio
import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from verl.agent_loop.base import LoopResult, LoopSample, PreparedLoops, prompt_of
from verl.agent_loop.buffer import Buffer
from verl.agent_loop.gate import Gate
from verl.agent_loop.journal import Journal, Phase
from verl.agent_loop.server_manager import AsyncLLMServerManager, SampledTurns
from verl.agent_loop.sessions import fill_from_batch, fill_session, session_metrics
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.protocol import DataProto
from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Group, InfraFault, Trajectory, trajectory_timing
from verl.utils.dataset.media import media_encoder_of
from verl.utils.dataset.prompts import MAX_REMEMBERED, Prompt, has_media
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.workers.reward_manager.adapters import as_grader
from verl.workers.reward_manager.service import GradingService
from verl.workers.rollout.base import EngineLostError, Rollout
from verl.workers.rollout.sequences import SEED_COLUMN, sampling_options

MIN_ROWS_AHEAD = 16
MAX_ENCODING_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What holds for all groups that are generated together."""

    step: int = -1
    is_validation: bool = False
    does_sample: bool | None = None
    """False is greedy; None is what the configuration says."""

    @property
    def phase(self) -> Phase:
        if self.is_validation:
            return "validation"
        return "greedy" if self.does_sample is False else "train"

    @property
    def meta_info(self) -> dict[str, Any]:
        """The options as `generate_sequences` takes them."""
        stated = {"validate": self.is_validation or None, "do_sample": self.does_sample}
        known = {name: value for name, value in stated.items() if value is not None}
        return {"global_steps": self.step, **known}


def new_groups(
    prompts: DataProto, num_samples: int, *, step: int, seed_of: Callable[[str, int], int]
) -> list[Group]:
    """A group of empty trajectories for each prompt; `seed_of(uid, sample)` seeds each of them."""
    groups: list[Group] = []
    for index, row in enumerate(rows_of(prompts)):
        uid = row["uid"]
        trajectories = [
            Trajectory(uid=uid, sample=sample, row=row, seed=seed_of(uid, sample))
            for sample in range(num_samples)
        ]
        groups.append(Group(index=index, uid=uid, drawn_at=step, trajectories=trajectories))
    return groups


class GroupSource(ABC):
    """Fills the trajectories of groups, for a buffer or for whoever waits."""

    grading: GradingService | None = None
    """Grades training trajectories as they end; None where that is done afterwards."""

    val_grading: GradingService | None = None
    """The same for validation."""

    gate: Gate | None = None
    """Through which training rows go where weights change while they are generated."""

    journal: Journal | None = None
    """Where replies of tools, users and environments are kept; None where nothing is resumed."""

    def submit(
        self, groups: Sequence[Group], options: RolloutOptions, buffer: Buffer
    ) -> "Future[None]":
        """Begin to generate; the groups come to the buffer as they end."""
        indices = buffer.begin(len(groups), step=options.step)
        for index, group in zip(indices, groups, strict=True):
            group.index = index

        def check(work: "Future[None]") -> None:
            error = None if work.cancelled() else work.exception(timeout=0)
            if error is not None:
                buffer.fail(error)

        work = self.start(groups, options, buffer.put)
        work.add_done_callback(check)
        return work

    def generate(self, groups: Sequence[Group], options: RolloutOptions) -> None:
        """Generate and wait, for validation and baselines."""
        work = self.start(groups, options, lambda group: None)
        try:
            work.result(timeout=None)
        finally:
            work.cancel()

    @abstractmethod
    def start(
        self, groups: Sequence[Group], options: RolloutOptions, put: Callable[[Group], None]
    ) -> "Future[None]":
        """Begin to generate; `put` is called with each group when it has ended."""

    @abstractmethod
    def take_report(self, groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics and seconds to report of groups that have ended, and of engines since the last
        time."""

    def close_loops(self) -> None:  # noqa: B027
        """End what loops keep for the run, such as tools; whoever generates again begins anew."""

    def end_grading(self) -> None:
        """End the threads that grade; whoever generates again starts new ones."""
        for service in (self.grading, self.val_grading):
            if service is not None:
                service.close()
        self.grading = self.grading and GradingService(self.grading.grader)
        self.val_grading = self.val_grading and GradingService(self.val_grading.grader)


class Rollouter(GroupSource):
    """Runs agent loops over engines; the loops run in this process, wherever the engines are.

    `wake_up` is given where engines have processes of their own, which may be lost.
    """

    def __init__(
        self,
        config: Any,
        servers: AsyncLLMServerManager,
        *,
        tokenizer: Any,
        processor: Any = None,
        wake_up: Callable[[], None] | None = None,
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.config = config
        self.servers = servers
        self.tokenizer = tokenizer
        self.processor = processor
        self.padding = Padding(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=tokenizer.pad_token_id,
        )
        if processor is not None:
            servers.find_media = media_encoder_of(
                tokenizer, processor, config.data.mm_processor_kwargs
            ).find
        self._wake_up = wake_up
        self._loops = PreparedLoops(config, tokenizer, processor)
        self._seconds: dict[str, float] = {}
        self._num_restarts: dict[Rollout, int] = {}
        self._num_redispatched = 0

    def grade_with(self, reward_fn: Any, val_reward_fn: Any) -> None:
        """From now on grade each trajectory as soon as it ends, with a grader of that scope."""
        self.grading = self._grading_of(reward_fn)
        self.val_grading = self._grading_of(val_reward_fn)

    def _grading_of(self, reward_fn: Any) -> GradingService | None:
        if reward_fn is None:
            return None
        grader = as_grader(reward_fn, functools.partial(padded_batch, padding=self.padding))
        return GradingService(grader) if grader.scope == "trajectory" else None

    def start(
        self, groups: Sequence[Group], options: RolloutOptions, put: Callable[[Group], None]
    ) -> "Future[None]":
        if self._wake_up is not None:
            self._wake_up()  # engines in this process wake by themselves
        return asyncio.run_coroutine_threadsafe(
            self._generate(groups, options, put), rollout_loop(os.getpid())
        )

    def close_loops(self) -> None:
        self._loops.close()

    def take_report(self, groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, float]]:
        trajectories = [t for group in groups for t in group.trajectories]
        metrics = session_metrics(groups)
        seconds = {**trajectory_timing(trajectories), **self._seconds}
        self._seconds = {}
        if self._wake_up is not None:
            before, redispatched = self._num_restarts, self._num_redispatched
            self._num_restarts = self._count_restarts()
            self._num_redispatched = self.servers.num_redispatched
            metrics["rollout/engine_restarts"] = sum(
                number - before.get(engine, 0) for engine, number in self._num_restarts.items()
            )
            metrics["rollout/redispatched"] = self._num_redispatched - redispatched
        return metrics, seconds

    def _count_restarts(self) -> dict[Rollout, int]:
        counts: dict[Rollout, int] = {}
        for engine in self.servers.server_handles:
            try:
                counts[engine] = engine.num_restarts
            except EngineLostError:  # its process is gone, and the count with it
                counts[engine] = self._num_restarts.get(engine, 0)
        return counts

    async def _generate(
        self, groups: Sequence[Group], options: RolloutOptions, put: Callable[[Group], None]
    ) -> None:
        gate = self._gate_of(options)
        if gate is not None:  # before anything is awaited: updates that come later find them
            for group in groups:
                for trajectory in group.trajectories:
                    gate.begin(group.index, trajectory.sample)
        service = self.val_grading if options.is_validation else self.grading
        grading = None if service is None else GradedGeneration(service)
        params = sampling_options(self.config.actor_rollout_ref.rollout, options.meta_info)
        traces = trace_infos(groups, options)
        rows = [trajectory.row for group in groups for trajectory in group.trajectories]
        for name in dict.fromkeys(self._loops.name_of(row) for row in rows):
            await asyncio.to_thread(self._loops.prepare, name)  # it may connect to servers
        await self._encode_ahead(groups)
        if self.journal is not None:
            await self.journal.begin(options.step)
        # One task per group, made in order: samples of a prompt reach the engine together.
        tasks = [
            asyncio.create_task(self._run_group(group, options, params, trace, grading, put))
            for group, trace in zip(groups, traces, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            if grading is not None:
                grading.cancel()
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _gate_of(self, options: RolloutOptions) -> Gate | None:
        return self.gate if options.phase == "train" else None

    async def _encode_ahead(self, groups: Sequence[Group]) -> None:
        """Encode the prompts of single-turn loops on several cores, before any loop starts.

        The loops find their prompts encoded and still reach the engine in order.
        """
        rows = [group.trajectories[0].row for group in groups[:MAX_REMEMBERED]]
        chosen = self._loops.prepare(self._loops.default)
        if len(rows) < MIN_ROWS_AHEAD or chosen.cls is not SingleTurnAgentLoop:
            return
        prompts = [prompt_of(row) for row in rows if not row.get("agent_name")]
        prompts = [prompt for prompt in prompts if not has_media(prompt)]
        loop = self._loops.make(chosen, self.servers)

        def encode(part: Sequence[Prompt]) -> None:
            for prompt in part:
                loop.encode(prompt)

        num_parts = min(MAX_ENCODING_THREADS, os.cpu_count() or 1)
        parts = [prompts[part::num_parts] for part in range(num_parts)]
        # A prompt that cannot be encoded raises again in its own loop.
        await asyncio.gather(
            *(asyncio.to_thread(encode, part) for part in parts), return_exceptions=True
        )

    async def _run_group(
        self,
        group: Group,
        options: RolloutOptions,
        params: Mapping[str, Any],
        traces: Sequence[Mapping[str, Any] | None],
        grading: "GradedGeneration | None",
        put: Callable[[Group], None],
    ) -> None:
        rows_of_sample: dict[int, list[Trajectory]] = {}
        gate = self._gate_of(options)
        gated = [gate and gate.rows[group.index, t.sample] for t in group.trajectories]

        def end(number: int, result: LoopResult | InfraFault, turns: SampledTurns) -> None:
            trajectory = group.trajectories[number]
            rows_of_sample[number] = fill_session(
                trajectory, result, turns, self.padding.response_length, self.tokenizer
            )
            row_in_gate = gated[number]
            if row_in_gate is not None:
                row_in_gate.gate.end(row_in_gate)
            is_gradable = trajectory.grade is None and trajectory.reward_score is None
            if grading is not None and is_gradable:
                grading.add(trajectory)

        row = loop_columns(group.trajectories[0].row)
        samples = [
            LoopSample(
                params=dict(params) if t.seed is None else {**params, "seed": t.seed},
                row=row if t.row is group.trajectories[0].row else loop_columns(t.row),
                end=functools.partial(end, number),
                trace=trace,
                journal=self.journal
                and self.journal.trajectory(
                    options.step,
                    options.phase,
                    t.uid,
                    t.sample,
                    goes_on=row_of is not None and bool(row_of.recorded),
                ),
                gated=row_of,
            )
            for number, (t, trace, row_of) in enumerate(
                zip(group.trajectories, traces, gated, strict=True)
            )
        ]
        chosen = self._loops.prepare(self._loops.name_of(row))
        versions = self.servers.fleet.versions() if gate is None else set[int]()
        try:
            make = functools.partial(self._loops.make, chosen, self.servers)
            await chosen.cls.run_group(make, samples)
        except InfraFault as fault:
            for number in set(range(len(samples))) - rows_of_sample.keys():
                end(number, fault, SampledTurns())
        if len(rows_of_sample) < len(samples):
            raise RuntimeError(
                f"{chosen.cls.__name__}.run_group ended {len(rows_of_sample)} of {len(samples)} "
                "samples; it must call `end` of each, or `run_in`, which does"
            )
        group.lost = [t for n, t in enumerate(group.trajectories) if not rows_of_sample[n]]
        group.trajectories = [t for n in sorted(rows_of_sample) for t in rows_of_sample[n]]
        if self.journal is not None:
            await self.journal.files.written()  # before anybody sees what follows from it
        if gate is None:
            is_one = len(versions) == 1 and versions == self.servers.fleet.versions()
        else:  # engines may be taking in weights right now
            versions = {version for t in group.trajectories for version in t.versions}
            is_one = len(versions) == 1 and all(t.versions for t in group.trajectories)
        group.version = min(versions) if is_one else None
        if grading is not None:
            await grading.finish(group)
            self._seconds["reward_wait"] = grading.seconds_after_last_response()
        put(group)


class GradedGeneration:
    """Hands the trajectories of one generation to a grading service as they end."""

    def __init__(self, service: GradingService) -> None:
        self._service = service
        self._added: list[Trajectory] = []
        self._num_submitted = 0
        self._ended_at = time.perf_counter()

    def add(self, trajectory: Trajectory) -> None:
        """Grade a trajectory, together with all that end in this turn of the event loop."""
        self._added.append(trajectory)
        if len(self._added) == self._num_submitted + 1:
            asyncio.get_running_loop().call_soon(self._submit)

    def _submit(self) -> None:
        ended = self._added[self._num_submitted :]
        self._num_submitted = len(self._added)
        self._service.submit(ended)

    async def finish(self, group: Group) -> None:
        """Wait for the grades of a group that has ended; infra errors are retried when scored."""
        self._ended_at = time.perf_counter()
        ungraded = [t for t in group.last_rows if t.reward_score is None]
        await asyncio.wrap_future(self._service.grade_once(ungraded, is_reported=False))

    def seconds_after_last_response(self) -> float:
        return time.perf_counter() - self._ended_at

    def cancel(self) -> None:
        self._num_submitted = len(self._added)  # they may not have been handed over yet
        self._service.cancel()


class BatchSource(GroupSource):
    """Groups from an object with `generate_sequences`: a user's manager, or a dump of rollouts."""

    def __init__(self, manager: Any, loop_batch: Callable[[DataProto], DataProto]) -> None:
        self.manager = manager
        self._loop_batch = loop_batch
        self._metrics: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def start(
        self, groups: Sequence[Group], options: RolloutOptions, put: Callable[[Group], None]
    ) -> "Future[None]":
        trajectories = [t for group in groups for t in group.trajectories]
        request = self._loop_batch(
            DataProto.from_dict(
                non_tensors={
                    name: [t.row[name] for t in trajectories]
                    for name in loop_columns(trajectories[0].row)
                }
            )
        )
        request.meta_info = options.meta_info
        request.non_tensor_batch[SEED_COLUMN] = np.array(
            [t.seed for t in trajectories], dtype=object
        )
        batch = self.manager.generate_sequences(request)
        fill_from_batch(groups, batch)
        self._metrics |= batch.meta_info.pop("metrics", {})
        self._seconds |= batch.meta_info.pop("timing", {})
        for group in groups:
            group.version = batch.meta_info.get("policy_version")
            put(group)
        work: Future[None] = Future()
        work.set_result(None)
        return work

    def take_report(self, groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, float]]:
        report = self._metrics, self._seconds
        self._metrics, self._seconds = {}, {}
        return report


def loop_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a loop sees of a row: all but tensors."""
    return {name: value for name, value in row.items() if not isinstance(value, Tensor)}


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The rows of a batch as mappings; tensor columns give a tensor each."""
    columns: dict[str, Iterable[Any]] = dict(batch.non_tensor_batch)
    if batch.batch is not None:
        columns |= {name: batch.batch[name].unbind() for name in batch.batch.keys()}  # noqa: SIM118
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def trace_infos(
    groups: Sequence[Group], options: RolloutOptions
) -> list[list[dict[str, Any] | None]]:
    """What `rollout_trace_attr` is told of each trajectory; None while nothing is traced."""
    config = RolloutTraceConfig.get_instance()
    if config.tracer is None:
        return [[None] * len(group.trajectories) for group in groups]
    limit = config.max_samples_per_step_per_worker
    infos: list[list[dict[str, Any] | None]] = []
    place = 0
    for group in groups:
        infos.append([])
        for trajectory in group.trajectories:
            infos[-1].append(
                {
                    "step": options.step,
                    "sample_index": trajectory.row.get("index", group.index),
                    "rollout_n": trajectory.sample,
                    "validate": options.is_validation,
                    "trace": limit is None or place < limit,
                }
            )
            place += 1
    return infos


@functools.cache
def rollout_loop(pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of all agent loops of this process, on a thread of its own.

    A loop that raises `SystemExit` ends its generation, not the thread.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue  # whoever waits for that generation has it

    threading.Thread(target=run, name="rollout", daemon=True).start()
    return loop
