"""Devices of the trainer that generate while it waits for rows.

    trainer                                lent engines: processes of their own on its devices
      waits; few of the rows have ended -->  wake up, get the published weights, join the fleet
                                             rows in flight are spread over all engines
      the rows are there  ---------------->  leave the fleet, sleep
      trains

What is trained is ahead of what rows may be sampled with, so lent engines have weights of their own
and the trainer's are untouched. Which tokens are sampled does not depend on who is asked, so a run
ends the same with lent devices or without.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.config.ppo import PPOConfig
from verl.config.roles import async_mode
from verl.single_controller.base.failures import WorkerDied
from verl.trainer.ppo.context import Report
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.publish import SentWeights
from verl.workers.rollout.remote import RemoteRollout

DRAIN_SECONDS = 60.0
"""How long an engine may take to end requests that were aborted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LendingRule:
    """When to lend; the words are those of `hybrid_rollout`."""

    ratio: float
    is_adaptive: bool = False
    step_up: float = 0.0
    step_down: float = 0.0
    release_steps: int = 1
    window: int = 1
    rebalances: bool = True
    """Rows in flight are asked for again, so that lent engines get some of them."""


def lending_rule(config: PPOConfig) -> LendingRule | None:
    """None where nothing is lent."""
    mode, training = async_mode(config), config.async_training
    switch = config.trainer.v1.separate_async.hybrid_rollout
    if mode == "separate_async" and switch.enable_switch:
        return LendingRule(
            ratio=switch.switch_threshold_ratio,
            is_adaptive=switch.adaptive_switch_threshold,
            step_up=switch.switch_threshold_step_up,
            step_down=switch.switch_threshold_step_down,
            release_steps=switch.switch_threshold_release_steps,
            window=switch.switch_cost_window_size,
        )
    if mode == "fully_async" and training.use_dynamic_resource_scheduling:
        return LendingRule(
            ratio=training.dynamic_schedule_deactivate_ratio,
            rebalances=training.dynamic_schedule_enable_rebalance,
        )
    return None


class Threshold:
    """Share of ended rows up to which lending pays.

    Adaptive: a wait that was longer than what switching takes (mean of the last `window`) raises
    it; `release_steps` waits in a row that were not lower it.
    """

    def __init__(self, rule: LendingRule) -> None:
        self.value = rule.ratio
        self._rule = rule
        self._costs: deque[float] = deque(maxlen=rule.window)
        self._num_short = 0

    def learn(self, *, wait_seconds: float, switch_seconds: float) -> None:
        rule = self._rule
        self._costs.append(switch_seconds)
        if not rule.is_adaptive:
            return
        if wait_seconds > fmean(self._costs):
            self._num_short, self.value = 0, min(1.0, self.value + rule.step_up)
            return
        self._num_short += 1
        if self._num_short >= rule.release_steps:  # at the least it is tried where nothing ended
            self._num_short, self.value = 0, max(rule.step_down, self.value - rule.step_down)


class Lending:
    """Lends the engines of `group`, which sleep until then."""

    def __init__(
        self,
        rule: LendingRule,
        group: Any,
        engines: Sequence[RemoteRollout],
        publisher: SentWeights,
        servers: AsyncLLMServerManager,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.rule, self.threshold = rule, Threshold(rule)
        self._group, self._engines = group, list(engines)
        self._publisher, self._servers, self._loop = publisher, servers, loop
        for engine in self._engines:
            engine.sleep()

    @contextmanager
    def while_waiting(self, running_share: float, report: Report) -> Iterator[None]:
        """While the trainer waits for rows, of which this share has not ended."""
        ended = max(0.0, 1.0 - running_share)
        is_lent = running_share > 0 and ended <= self.threshold.value and bool(self._engines)
        report.add("separate_async/decision/finished_ratio", ended)
        report.add("separate_async/decision/threshold", self.threshold.value)
        start = time.perf_counter()
        is_lent = is_lent and self._lend()
        report.count({"separate_async/switch/count": int(is_lent)})
        lent = time.perf_counter()
        try:
            yield
        finally:
            waited = time.perf_counter()
            if is_lent:
                self._give_back()
                seconds = (lent - start, waited - lent, time.perf_counter() - waited)
                for name, spent in zip(("to_rollout", "wait", "to_trainer"), seconds, strict=True):
                    key = f"switch_{name}"
                    report.timing[key] = report.timing.get(key, 0.0) + spent
                self.threshold.learn(
                    wait_seconds=seconds[1], switch_seconds=seconds[0] + seconds[2]
                )

    def _lend(self) -> bool:
        """Weights first, then requests; False where the lent processes are gone."""
        try:
            for engine in self._engines:
                engine.wake_up()
            self._publisher.send_published(self._group)
        except (EngineLostError, WorkerDied) as error:
            logger.warning("devices are not lent any more: the processes there are gone: %s", error)
            self._engines = []
            return False
        for engine in self._engines:
            self._servers.fleet.add(engine)
        if self.rule.rebalances:
            self._abort_turns()
        return True

    def _give_back(self) -> None:
        fleet, waiting = self._servers.fleet, list(self._engines)
        waiting = [engine for engine in waiting if not fleet.retire(engine)]
        give_up = time.monotonic() + DRAIN_SECONDS
        if waiting:
            self._abort_turns()  # their rows go on elsewhere
        while waiting and time.monotonic() < give_up:
            time.sleep(0.001)
            waiting = [engine for engine in waiting if not fleet.retire(engine)]
        if waiting:
            raise TimeoutError(
                f"{len(waiting)} lent engines still have requests {DRAIN_SECONDS:g} s after these "
                "were aborted"
            )
        try:
            for engine in self._engines:
                engine.sleep()
        except EngineLostError as error:
            logger.warning("a lent engine is lost: %s", error)

    def _abort_turns(self) -> None:
        async def abort() -> None:
            self._servers.abort_turns()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(timeout=DRAIN_SECONDS)
