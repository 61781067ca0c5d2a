"""The agent loop of CollabLLM: one answer that is trained, and conversations that go on from it.

    prompt -> answer (trained) -+-> user -> model -> user -> ...    continuation 1
                                +-> user -> model -> ...            continuation 2, with other seeds

`multi_turn.num_repeat_rollouts` continuations are simulated with the row's interaction. They are in
the column `conversations`, for the reward manager `collabllm` to grade; their tokens are not
trained. Continuations of one answer run one after the other, so that replies of the user are
journalled in an order that a resumed run finds again.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.conversation import Conversation
from verl.agent_loop.tool_agent import AgentData, AgentState, ToolAgentLoop, as_messages
from verl.utils.rollout_trace import rollout_trace_op


class CollabLLMAgentLoop(ToolAgentLoop):
    """Answers once, and lets a simulated user take it from there."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if self.world.tools.tools or not self.world.interactions.users:
            raise ValueError(
                "the loop collabllm_agent needs a simulated user and takes no tools: set "
                "actor_rollout_ref.rollout.multi_turn.interaction_config_path, and no "
                "tool_config_path"
            )
        extra_info: Mapping[str, Any] = kwargs.get("extra_info") or {}
        about_user = kwargs.get("interaction_kwargs") or extra_info.get("interaction_kwargs") or {}
        messages = as_messages(kwargs["raw_prompt"])
        with Conversation(self, self.encode(kwargs["raw_prompt"]), sampling_params) as answered:
            turn = await answered.generate()
            said = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            output = answered.output()
            conversations: list[list[dict[str, Any]]] = []
            scores: list[float] = []
            for number in range(self.turns.num_repeat_rollouts or 1):
                agent = AgentData(
                    messages=list(messages),
                    request_id=uuid.uuid4().hex,
                    interaction_kwargs=about_user,
                    conversation=answered.fork(number),
                )
                if turn.stop_reason != "abort" and answered.room > 0:
                    await self._continue(agent)
                conversations.append(agent.messages)
                scores += agent.turn_scores
        output.extra_fields = {"conversations": conversations, "turn_scores": scores}
        return output

    async def _continue(self, agent: AgentData) -> None:
        """User and model in turns, until the user ends it or the turns are used up."""
        assert agent.conversation is not None
        user = await self.world.interactions.start(agent.interaction_kwargs)
        agent.interaction = user.interaction
        lease = self.world.tools.lease(agent.request_id, {}, None)
        try:
            state = AgentState.INTERACTING
            while state is not AgentState.TERMINATED:
                if state is AgentState.GENERATING:
                    state = await self.generate_turn(agent, lease)
                else:
                    state = await self.ask_user(agent, user)
        finally:
            agent.conversation.close()
            await user.finalize()
