"""An engine that answers from a table, and a configuration for agent loops."""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable

from verl.config.data import DataConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.rollout import AgentLoopConfig, RolloutConfig
from verl.config.serving import SamplingConfig
from verl.workers.rollout.base import GenerationRequest, Rollout, TokenOutput
from verl.workers.rollout.fleet import Fleet


@functools.cache
def engine_loop(pid: int) -> asyncio.AbstractEventLoop:
    """An event loop on a thread of its own, for all fakes of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fake engines", daemon=True).start()
    return loop


class FakeRollout(Rollout):
    """Answers with the prompt's last token, its seed and an end token, after some turns of the
    event loop, and not before `hold` is false."""

    def __init__(
        self,
        *,
        error: Exception | None = None,
        delay_of: dict[int, int] | None = None,
        hold: Callable[[], bool] = lambda: False,
    ):
        self.requests: list[GenerationRequest] = []
        self.error = error
        self.delay_of = delay_of or {}
        self.hold = hold
        self.closed_sessions: list[str] = []

    @property
    def policy_version(self) -> int:
        return 0

    def submit(self, request, on_end=None):
        work = self._answer(request, on_end)
        return asyncio.run_coroutine_threadsafe(work, engine_loop(os.getpid()))

    async def _answer(self, request, on_end):
        outputs = await self.generate(request)
        for sample, output in enumerate(outputs):
            if on_end is not None:
                on_end(sample, output)
        return outputs

    async def generate(self, request):
        self.requests.append(request)
        for _ in range(self.delay_of.get(request.prompt_ids[-1], 0)):
            await asyncio.sleep(0)
        while self.hold():
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        seeds = request.seeds or [0] * request.num_samples
        return [
            TokenOutput(
                token_ids=[request.prompt_ids[-1], seed % 50, 2],
                log_probs=[-0.5, -1.0, -1.5],
                policy_versions=[0, 0, 0],
                stop_reason="stop",
            )
            for seed in seeds
        ]

    def abort(self, request_id):
        pass

    def close_session(self, session_id):
        self.closed_sessions.append(session_id)

    def sleep(self):
        pass

    def wake_up(self):
        pass


def held_engines(num_engines: int, num_requests: int) -> list[FakeRollout]:
    """Engines that answer once they have got so many requests together."""
    engines: list[FakeRollout] = []
    engines += [
        FakeRollout(hold=lambda: sum(len(one.requests) for one in engines) < num_requests)
        for _ in range(num_engines)
    ]
    return engines


def loop_config(*, agent: AgentLoopConfig | None = None, **rollout) -> PPOConfig:
    return PPOConfig(
        data=DataConfig(max_prompt_length=6, max_response_length=4),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(
                **{
                    "prompt_length": 6,
                    "response_length": 4,
                    "max_num_seqs": 8,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "val_kwargs": SamplingConfig(temperature=0.3, do_sample=True, top_k=5),
                    "agent": agent or AgentLoopConfig(),
                    **rollout,
                }
            )
        ),
    )


def idle_load(fleet: Fleet) -> list[int]:
    """Outstanding tokens when no request runs any more."""
    deadline = time.monotonic() + 60
    while any(slot.num_running for slot in fleet.slots) and time.monotonic() < deadline:
        time.sleep(0.001)
    return fleet.outstanding
