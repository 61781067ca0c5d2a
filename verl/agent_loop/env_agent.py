"""`env_agent`: the model acts in an environment until the episode is over.

    prompt, first observation -> turn of the model -> step -> observation -> turn -> ... -> done

Which environment: the row's `env` (a column, or in `extra_info`), else the `env` section of the
configuration. Which episode: `extra_info.seed`, else one that belongs to the prompt's uid, so all
samples of a group play the same one. What the episode earned is the sum over its steps; a custom
reward function grades instead, and finds the steps in `extra_info["turn_scores"]`.

A turn that the response length cut is not an action: the episode ends with what it has earned. An
environment that is broken ends the trajectory with an `InfraFault`.
"""

import json
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, prompt_of
from verl.agent_loop.conversation import Conversation
from verl.agent_loop.journal import journalled
from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.environments.base import Action, Observation, ToolCall
from verl.environments.host import as_message, from_message
from verl.environments.pool import EnvironmentLease, EnvironmentPool, EnvironmentSpec
from verl.tools.parsers import FunctionCall, ToolParser
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import TokenOutput

MARKER = "\n...(truncated)...\n"
MAX_ROW_CHARACTERS = 1 << 20

_pools: "weakref.WeakKeyDictionary[AsyncLLMServerManager, EnvironmentPool]"
_pools = weakref.WeakKeyDictionary()
"""A pool for each run; it ends with it."""


def pool_of(servers: AsyncLLMServerManager, config: Any) -> EnvironmentPool:
    if servers not in _pools:
        _pools[servers] = EnvironmentPool(
            num_workers=config.env.num_workers, timeout_seconds=config.env.timeout_seconds
        )
    return _pools[servers]


class EnvAgentLoop(AgentLoopBase):
    """One episode."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        spec = environment_of(kwargs, self.config)
        seed = episode_seed(kwargs)
        owner = f"prompt {kwargs.get('uid', kwargs.get('index', '?'))}"
        lease = pool_of(self.server_manager, self.config).lease(owner)
        try:
            return await self._play(Episode(lease, spec, seed), sampling_params, kwargs)
        finally:
            await lease.release()

    async def _play(
        self, episode: "Episode", sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        first, tools = await episode.begin(row)
        prompt = self._prompt(prompt_of(row), first)
        prompt_ids, media = await self.encode_with_media(prompt, tools or None)
        parser = None
        if tools:
            name = self.config.actor_rollout_ref.rollout.multi_turn.format
            parser = ToolParser.get_tool_parser(name, self.tokenizer)
            stops = [*(sampling_params.get("stop_token_ids") or ()), *parser.stop_token_ids]
            sampling_params = {**sampling_params, "stop_token_ids": stops}
        continuation = self.continuation(
            tools or None, stop_token_ids=parser.stop_token_ids if parser else ()
        )
        with Conversation(
            self, prompt_ids, sampling_params, continuation=continuation, media=media
        ) as conversation:
            await self._take_turns(conversation, episode, parser, tools)
            conversation.metrics.env_wait = episode.lease.waited_seconds
            conversation.metrics.tool_calls += episode.seconds - episode.lease.waited_seconds
            return conversation.output(
                reward_score=self._score(episode.rewards),
                extra_fields={
                    "turn_scores": [0.0 if r is None else r for r in episode.rewards],
                    "env_info": episode.info,
                },
            )

    async def _take_turns(
        self,
        conversation: Conversation,
        episode: "Episode",
        parser: ToolParser | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        limits = self.config.actor_rollout_ref.rollout.multi_turn
        max_turns: int | None = limits.max_assistant_turns
        while True:
            turn = await conversation.generate()
            if turn.stop_reason == "length":
                return
            observation = await episode.step(await self._action(turn, parser, tools))
            if observation.done or conversation.assistant_turns == max_turns:
                return
            messages = self._messages(observation)
            await self.prepare_images(messages)
            if not conversation.append_messages(messages):
                return

    async def _action(
        self, turn: TokenOutput, parser: ToolParser | None, tools: Sequence[Mapping[str, Any]]
    ) -> Action:
        if parser is None:
            return Action(self.tokenizer.decode(turn.token_ids, skip_special_tokens=True))
        text, calls = await parser.extract_tool_calls(turn.token_ids, tools)
        limit = self.config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls
        return Action(text, [tool_call_of(call) for call in calls[:limit]])

    def _prompt(self, prompt: Any, first: Observation) -> Any:
        """The row's prompt; where it has no turn of a user, what the environment shows first."""
        if isinstance(prompt, str):
            return prompt or self._messages(first)
        if any(message["role"] == "user" for message in prompt):
            return prompt
        return [*prompt, *self._messages(first)]

    def _messages(self, observation: Observation) -> list[dict[str, Any]]:
        messages = observation.messages or [{"role": "user", "content": observation.text or ""}]
        limit: int = self.config.env.max_observation_length
        messages = [
            {**one, "content": shortened(one["content"], limit)}
            if isinstance(one.get("content"), str)
            else one
            for one in messages
        ]
        return [*messages[:-1], with_images(messages[-1], observation.images)]

    def _score(self, rewards: Sequence[float | None]) -> float | None:
        """None where somebody else grades: the user's function, or the environment gave nothing."""
        if self.config.custom_reward_function.path:
            return None
        if rewards and all(reward is None for reward in rewards):
            return None
        return sum((reward or 0.0 for reward in rewards), 0.0)


class Episode:
    """What happens between a trajectory and its environment; replies pass through the journal."""

    def __init__(self, lease: EnvironmentLease, spec: EnvironmentSpec, seed: int) -> None:
        self.lease = lease
        self.spec = spec
        self.seed = seed
        self.rewards: list[float | None] = []
        self.info: dict[str, Any] = {}
        self.seconds = 0.0

    async def begin(self, row: Mapping[str, Any]) -> tuple[Observation, list[dict[str, Any]]]:
        columns = plain_columns(row)
        request = {
            "env": self.spec.name,
            "kwargs": dict(self.spec.kwargs),
            "seed": self.seed,
        }

        async def reset() -> dict[str, Any]:
            observation, tools = await self.lease.reset(self.spec, columns, self.seed)
            return {"observation": as_message(observation), "tools": tools}

        reply = await self._asked("env.reset", request, reset)
        return from_message(reply["observation"]), reply["tools"]

    async def step(self, action: Action) -> Observation:
        calls = [vars(one) for one in action.tool_calls]

        async def step() -> dict[str, Any]:
            return {"observation": as_message(await self.lease.step(action))}

        reply = await self._asked("env.step", {"text": str(action), "tool_calls": calls}, step)
        observation = from_message(reply["observation"])
        self.rewards.append(observation.reward)
        self.info = observation.info
        return observation

    async def _asked(self, kind: str, request: dict[str, Any], call: Any) -> dict[str, Any]:
        start = time.perf_counter()
        reply = await journalled(kind, request, call)
        self.seconds += time.perf_counter() - start
        return reply


def with_images(message: dict[str, Any], images: Sequence[bytes]) -> dict[str, Any]:
    """The message with images before its words."""
    if not images:
        return message
    content = message["content"]
    words = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*({"type": "image", "image": i} for i in images), *words]}


def tool_call_of(call: FunctionCall) -> ToolCall:
    try:
        return ToolCall(call.name, call.parsed_arguments())
    except ValueError as error:
        return ToolCall(call.name, {}, str(error))


def environment_of(row: Mapping[str, Any], config: Any) -> EnvironmentSpec:
    stated = row.get("env") or (row.get("extra_info") or {}).get("env")
    if stated is not None:
        return EnvironmentSpec.of(stated)
    if config.env.name is None:
        raise ValueError(
            "the row names no environment: set env.name (such as textarena:GuessTheNumber-v0), or "
            'give rows a column env with {"name": ..., "kwargs": ...}'
        )
    return EnvironmentSpec(
        name=config.env.name, kwargs=dict(config.env.kwargs), python=config.env.python
    )


def episode_seed(row: Mapping[str, Any]) -> int:
    seed = (row.get("extra_info") or {}).get("seed")
    if seed is not None:
        return int(seed)
    # A prompt without a name is one of its own.
    return keyed_seed("episode", str(row.get("uid", uuid.uuid4()))) & 0x7FFFFFFF


def plain_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row can be said in JSON, which is what an environment gets to see."""
    columns = {name: as_plain(value) for name, value in row.items()}
    return {name: value for name, value in columns.items() if is_json(value)}


def as_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): as_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    return value


def is_json(value: Any) -> bool:
    try:
        return len(json.dumps(value)) <= MAX_ROW_CHARACTERS
    except (TypeError, ValueError):
        return False


def shortened(text: str, limit: int) -> str:
    """The text; of a long one the beginning and the end."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    return text[:head] + MARKER + text[len(text) - (limit - head) :]
