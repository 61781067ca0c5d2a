"""A question and an answer: the prompt goes to the model once."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from verl.agent_loop.base import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    LoopSample,
    prompt_of,
)
from verl.agent_loop.server_manager import SampledTurns
from verl.utils.media import Media
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.base import TokenOutput


class SingleTurnAgentLoop(AgentLoopBase):
    """One user turn, one turn of the model."""

    @classmethod
    async def run_group(
        cls, make_loop: Callable[[], AgentLoopBase], samples: Sequence[LoopSample]
    ) -> None:
        """The samples of a prompt differ in their seeds only: one loop and one request for all.

        Traced samples, those of an asynchronous run, which end one by one and may be cut back, and
        those of a subclass with methods of its own get a loop each.
        """
        is_alone = any(sample.trace is not None or sample.gated is not None for sample in samples)
        is_plain = (cls.run, cls.apply_chat_template) == (
            SingleTurnAgentLoop.run,
            AgentLoopBase.apply_chat_template,
        )
        if is_alone or not is_plain:
            await super().run_group(make_loop, samples)
            return
        loop = make_loop()
        prompt_ids, media = await loop.encode_with_media(prompt_of(samples[0].row))
        start = time.perf_counter()
        session = uuid.uuid4().hex
        session_ids = [f"{session}-{number}" for number in range(len(samples))]
        await loop.server_manager.generate_group(
            session_ids,
            prompt_ids=prompt_ids,
            sampling_params=[sample.params for sample in samples],
            media=media,
            on_end=lambda number, output: samples[number].end(
                answer(prompt_ids, output, start, media),
                SampledTurns([output], session_ids[number]),
            ),
        )

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids, media = await self.encode_with_media(prompt_of(kwargs))
        start = time.perf_counter()
        output = await self.server_manager.generate(
            uuid.uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, media=media
        )
        return answer(prompt_ids, output, start, media)


def answer(
    prompt_ids: list[int], output: TokenOutput, start: float, media: Sequence[Media] = ()
) -> AgentLoopOutput:
    """The output of a loop whose only turn began at `start`."""
    return AgentLoopOutput(
        prompt_ids=prompt_ids,
        response_ids=output.token_ids,
        response_mask=[1] * len(output.token_ids),
        response_logprobs=output.log_probs,
        routed_experts=output.routed_experts,
        media=media,
        num_turns=2,
        stop_reason=output.stop_reason,
        metrics=AgentLoopMetrics(
            generate_sequences=time.perf_counter() - start, num_preempted=output.num_preempted
        ),
    )
