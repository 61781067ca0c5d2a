"""A question and an answer: the prompt goes to the model once."""

import time
import uuid
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.rollout_trace import rollout_trace_op


class SingleTurnAgentLoop(AgentLoopBase):
    """One user turn, one turn of the model."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        start = time.perf_counter()
        output = await self.server_manager.generate(
            uuid.uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            stop_reason=output.stop_reason,
            metrics=AgentLoopMetrics(
                generate_sequences=time.perf_counter() - start,
                num_preempted=output.num_preempted,
            ),
        )
