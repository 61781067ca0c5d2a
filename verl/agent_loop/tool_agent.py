"""`ToolAgentLoop`: a model that calls tools and talks to simulated users.

    PENDING --> GENERATING --> PROCESSING_TOOLS (the turn calls tools) ---+--> GENERATING ...
                    |  |                                                  |
                    |  +-----> INTERACTING (it does not, and the row has a user)
                    +--------> TERMINATED (nothing to answer, or a budget is used up)

Tools and users hold state of one trajectory: they are taken when it begins and given back in every
exit. What they reply is appended as ids that are not trained. Budgets are checked before a turn:
no tool runs whose reply the model would never see.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, prompt_of
from verl.agent_loop.conversation import Conversation
from verl.agent_loop.journal import journalled
from verl.interactions.base import BaseInteraction
from verl.interactions.registry import InteractionSet, UserLease, UserReply
from verl.protocol.trajectory import InfraFault
from verl.tools.leases import ToolLease, ToolSet
from verl.tools.orphans import start_reaping
from verl.tools.outcomes import ToolOutcome
from verl.tools.parsers import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import make_tool_set
from verl.utils.dataset.continuation import Continuation, continuation_of
from verl.utils.dataset.prompts import Message, Prompt, render
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.template_probe import REFUSALS

logger = logging.getLogger(__name__)


class AgentState(Enum):
    """What happens next in a trajectory."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass(eq=False)
class AgentData:
    """One trajectory as tools and interactions see it: `execute` gets it as `agent_data`."""

    messages: list[dict[str, Any]]
    image_data: Any = None
    video_data: Any = None
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    request_id: str = ""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    interaction: BaseInteraction | None = None
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    """None until the prompt is encoded."""

    turn_scores: list[float] = field(default_factory=list)
    """What the interaction gave for each turn."""

    tool_rewards: list[float] = field(default_factory=list)
    """What tools gave for each call."""

    tool_outcomes: Counter[str] = field(default_factory=Counter)
    """Calls by how they ended: `reply`, `refused`, `timeout`."""

    num_dropped_calls: int = 0
    """Calls beyond `max_parallel_calls`."""

    tool_calls: list[FunctionCall] = field(default_factory=list)
    """Calls of the last turn."""

    text: str = ""
    """The last turn without its calls."""

    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Columns to add to the batch; tools and interactions may add theirs."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt and everything after it."""
        conversation = self.conversation
        return [] if conversation is None else conversation.prompt_ids + conversation.response_ids

    @property
    def response_ids(self) -> list[int]:
        """The last turn of the model."""
        turns = self.conversation.turns if self.conversation is not None else []
        return turns[-1].token_ids if turns else []

    @property
    def response_mask(self) -> list[int]:
        return [] if self.conversation is None else self.conversation.response_mask

    @property
    def response_logprobs(self) -> list[float]:
        return [] if self.conversation is None else self.conversation.response_logprobs

    @property
    def user_turns(self) -> int:
        return 0 if self.conversation is None else self.conversation.user_turns

    @property
    def assistant_turns(self) -> int:
        return 0 if self.conversation is None else self.conversation.assistant_turns


@dataclass(frozen=True)
class AgentWorld:
    """What all trajectories of a run share: tools, users, and the format of calls."""

    tools: ToolSet
    interactions: InteractionSet
    parser: ToolParser | None
    """None while there are no tools."""

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> "AgentWorld":
        """The world that the configuration describes; raises where the model cannot live in it."""
        turns = config.actor_rollout_ref.rollout.multi_turn
        records = Path(config.trainer.default_local_dir).expanduser()
        tools = make_tool_set(turns, records)
        start_reaping(tools, records)
        interactions = InteractionSet.of_file(
            turns.interaction_config_path, default_timeout=turns.tool_timeout_seconds
        )
        parser = ToolParser.get_tool_parser(turns.format, tokenizer) if tools.tools else None
        if turns.tool_server is not None and config.data.filter_overlong_prompts:
            logger.warning(
                "data.filter_overlong_prompts measures prompts without the tools of %s "
                "(rollout.multi_turn.tool_server), which are longer; leave them room below "
                "data.max_prompt_length",
                turns.tool_server,
            )
        world = cls(tools, interactions, parser)
        schemas = tools.lease("check").schemas
        follows = world.continuation(tokenizer, config.data.apply_chat_template_kwargs, schemas)
        follows.prove(*(["tool"] if schemas else ()), *(["user"] if interactions.users else ()))
        if schemas and ignores_tools(tokenizer, schemas, config.data.apply_chat_template_kwargs):
            logger.warning(
                "the chat template of %r writes the same prompt with and without tools, so the "
                "model is not told of %s; set data.chat_template to one that writes `tools`, "
                "unless the prompts describe them",
                tokenizer.name_or_path,
                sorted(tools.tools),
            )
        return world

    def continuation(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any], schemas: Sequence[Any]
    ) -> Continuation:
        return continuation_of(
            tokenizer,
            template_kwargs=dict(template_kwargs),
            tools=schemas,
            stop_token_ids=self.parser.stop_token_ids if self.parser is not None else (),
        )


def ignores_tools(
    tokenizer: Any, schemas: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> bool:
    question = [{"role": "user", "content": "Hello."}]
    texts: list[str] = []
    for tools in (schemas, None):
        try:
            texts.append(
                render(
                    question,
                    tokenizer,
                    add_generation_prompt=True,
                    tools=tools,
                    template_kwargs=kwargs,
                )
            )
        except REFUSALS:
            return False  # the first prompt says why
    return texts[0] == texts[1]


class ToolAgentLoop(AgentLoopBase):
    """Turns of the model, replies of tools and of a simulated user, until a budget is used up.

    A subclass may override a state's method; each returns the next state.
    """

    _worlds: list[tuple[Any, AgentWorld]] = []
    """Of each configuration in this process; tools are made once per run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.world = self.world_of(self.config, self.tokenizer)
        self.turns = self.config.actor_rollout_ref.rollout.multi_turn

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        cls.world_of(config, tokenizer)

    @classmethod
    def close_class(cls, config: Any) -> None:
        for entry in list(ToolAgentLoop._worlds):
            known, world = entry
            if known is config:
                ToolAgentLoop._worlds.remove(entry)
                world.tools.close()
                world.interactions.close()

    @classmethod
    def world_of(cls, config: Any, tokenizer: Any) -> AgentWorld:
        for known, world in ToolAgentLoop._worlds:
            if known is config:
                return world
        world = AgentWorld.of(config, tokenizer)
        ToolAgentLoop._worlds.append((config, world))
        return world

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        extra_info: Mapping[str, Any] = kwargs.get("extra_info") or {}
        agent = AgentData(
            messages=as_messages(prompt_of(kwargs)),
            request_id=uuid.uuid4().hex,
            tools_kwargs=kwargs.get("tools_kwargs") or extra_info.get("tools_kwargs") or {},
            interaction_kwargs=kwargs.get("interaction_kwargs")
            or extra_info.get("interaction_kwargs")
            or {},
        )
        if extra_info.get("need_tools_kwargs") and not agent.tools_kwargs:
            raise ValueError(
                "a row says need_tools_kwargs and has no tools_kwargs; add extra_info.tools_kwargs "
                "with the arguments of each tool"
            )
        lease = self.world.tools.lease(
            agent.request_id, agent.tools_kwargs, selection_of(extra_info)
        )
        user = None
        try:
            if self.world.interactions.users:
                user = await self.world.interactions.start(agent.interaction_kwargs)
                agent.interaction = user.interaction
            await self._begin(agent, kwargs["raw_prompt"], sampling_params, lease)
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                if state is AgentState.PENDING:
                    state = AgentState.GENERATING
                elif state is AgentState.GENERATING:
                    state = await self.generate_turn(agent, lease)
                elif state is AgentState.PROCESSING_TOOLS:
                    state = await self.call_tools(agent, lease)
                else:
                    assert user is not None
                    state = await self.ask_user(agent, user)
            if agent.tool_outcomes:  # what instances were worth is a reply from outside too

                async def scores() -> dict[str, float]:
                    rewards = await lease.release()
                    if lease.score_fault is not None:
                        raise InfraFault(lease.score_fault, reason="calc_reward")
                    return rewards

                lease.rewards = await journalled("tool_scores", {}, scores)
            return self._output(agent, lease)
        finally:
            if agent.conversation is not None:
                agent.conversation.close()
            try:
                await lease.release()
            finally:
                if user is not None:
                    await user.finalize()

    async def _begin(
        self, agent: AgentData, prompt: Prompt, sampling_params: dict[str, Any], lease: ToolLease
    ) -> None:
        schemas = lease.schemas
        params = dict(sampling_params)
        if self.world.parser is not None and schemas:
            stops = {*(params.get("stop_token_ids") or ()), *self.world.parser.stop_token_ids}
            if stops:
                params["stop_token_ids"] = sorted(stops)
        prompt_ids, media = await self.encode_with_media(prompt, schemas or None)
        agent.conversation = Conversation(
            self,
            prompt_ids,
            params,
            media=media,
            session_id=agent.request_id,
            continuation=self.world.continuation(
                self.tokenizer, self.apply_chat_template_kwargs, schemas
            ),
        )
        agent.metrics = agent.conversation.metrics

    async def generate_turn(self, agent: AgentData, lease: ToolLease) -> AgentState:
        """GENERATING: let the model speak, and see whom it speaks to."""
        conversation = agent.conversation
        assert conversation is not None
        turn = await conversation.generate()
        agent.text, agent.tool_calls = "", []
        if self.world.parser is not None and lease.names:
            agent.text, agent.tool_calls = await self.world.parser.extract_tool_calls(
                turn.token_ids, lease.schemas
            )
        said = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        agent.messages.append({"role": "assistant", "content": said})
        if turn.stop_reason == "abort" or conversation.room <= 0 or self._is_over(agent):
            return AgentState.TERMINATED
        if agent.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent.interaction is None else AgentState.INTERACTING

    def _is_over(self, agent: AgentData) -> bool:
        """Whether no further turn is allowed, so that nobody needs to be asked for a reply."""
        limits = (
            (agent.assistant_turns, self.turns.max_assistant_turns),
            (agent.user_turns, self.turns.max_user_turns),
        )
        return any(limit is not None and count >= limit for count, limit in limits)

    async def call_tools(self, agent: AgentData, lease: ToolLease) -> AgentState:
        """PROCESSING_TOOLS: run the calls of the turn, at once, and append what they replied."""
        limit = self.turns.max_parallel_calls
        calls = agent.tool_calls[:limit]
        agent.num_dropped_calls += len(agent.tool_calls) - len(calls)
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(self.call_tool(call, agent, lease) for call in calls))
        agent.metrics.tool_calls += time.perf_counter() - start
        for outcome in outcomes:
            if outcome.kind == "infra":
                raise InfraFault(
                    outcome.response.text or f"tool {outcome.tool!r} is out of service",
                    reason=outcome.tool,
                )
            agent.tool_outcomes[outcome.kind] += 1
            agent.tool_rewards.append(outcome.reward)
        replies = [
            {
                "role": "tool",
                "content": content_of(outcome.response),
                "name": call.name,
                "tool_call_id": call.tool_call_id or f"call{len(agent.messages) + number:05d}",
            }
            for number, (call, outcome) in enumerate(zip(calls, outcomes, strict=True))
        ]
        await self.prepare_images(replies)
        return self.append(agent, replies)

    async def call_tool(
        self, call: FunctionCall, agent: AgentData, lease: ToolLease
    ) -> ToolOutcome:
        """Run one call; its outcome says how it ended."""

        async def ask() -> dict[str, Any]:
            return (await lease.call(call, agent_data=agent)).as_dict()

        request = {"name": call.name, "arguments": call.arguments}
        return ToolOutcome.from_dict(await journalled("tool", request, ask))

    async def ask_user(self, agent: AgentData, user: UserLease) -> AgentState:
        """INTERACTING: let the simulated user answer the turn, and score it."""

        async def ask() -> dict[str, Any]:
            return (await user.reply(agent.messages)).as_dict()

        request = {"name": user.interaction.name, "said": agent.messages[-1]["content"]}
        reply = UserReply(**await journalled("interaction", request, ask))
        if reply.score is not None:
            agent.turn_scores.append(reply.score)
        agent.extra_fields |= reply.extra
        if reply.should_terminate:
            return AgentState.TERMINATED
        return self.append(agent, [{"role": "user", "content": reply.text}])

    def append(self, agent: AgentData, messages: Sequence[Message]) -> AgentState:
        """Add messages for the model to answer, if there is room for an answer."""
        assert agent.conversation is not None
        if not agent.conversation.append_messages(messages):
            return AgentState.TERMINATED
        agent.messages += map(dict, messages)
        return AgentState.GENERATING

    def _output(self, agent: AgentData, lease: ToolLease) -> AgentLoopOutput:
        assert agent.conversation is not None
        fields: dict[str, Any] = {
            "turn_scores": agent.turn_scores,
            "tool_rewards": agent.tool_rewards,
            **agent.extra_fields,
        }
        if self.world.tools.tools:
            fields["tool_outcomes"] = dict(agent.tool_outcomes)
            fields["tool_scores"] = dict(lease.rewards)
            fields["dropped_tool_calls"] = agent.num_dropped_calls
        return agent.conversation.output(extra_fields=fields)


def content_of(response: ToolResponse) -> str | list[dict[str, Any]]:
    """What a tool says, as the content of a message: its images first."""
    if not response.image:
        return response.text or ""
    images = [{"type": "image", "image": image} for image in response.image]
    return [*images, *([{"type": "text", "text": response.text}] if response.text else [])]


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def selection_of(extra_info: Mapping[str, Any]) -> Sequence[str] | None:
    """The names in `extra_info.tool_selection`; None offers all tools."""
    selection = extra_info.get("tool_selection")
    return None if selection is None else [str(name) for name in selection]
