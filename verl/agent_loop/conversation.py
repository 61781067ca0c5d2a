"""`Conversation`: one trajectory as it grows, turn by turn.

    prompt | turn of the model (mask 1) | replies (mask 0) | turn of the model (mask 1) | ...

Ids are appended and never changed: the next prompt is what the engine has seen, so it computes new
tokens only. Every turn has a seed of its own and the same session.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.protocol.trajectory import InfraFault
from verl.utils.dataset.continuation import Continuation
from verl.utils.dataset.media import UnreadableImage
from verl.utils.dataset.prompts import Message, has_media
from verl.utils.media import Media
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import TokenOutput


class Conversation:
    """A prompt and what followed it; use it as a context manager, or `close` it in every exit.

    `continuation` says how messages follow a turn; by default as the loop's chat template writes
    them, without tools. `response_length` is the room for everything after the prompt.
    """

    def __init__(
        self,
        loop: AgentLoopBase,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        continuation: Continuation | None = None,
        response_length: int | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        self.loop = loop
        self.media = list(media)
        self.prompt_ids = list(prompt_ids)
        self.sampling_params = dict(sampling_params)
        self.session_id = session_id or uuid.uuid4().hex
        self.continuation = continuation or loop.continuation()
        longest: int = loop.config.actor_rollout_ref.rollout.response_length
        self.response_length = longest if response_length is None else response_length
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.assistant_turns = 0
        self.user_turns = 0
        """Times that others spoke, however many messages each time."""

        self.turns: list[TokenOutput] = []
        self.metrics = AgentLoopMetrics()
        self._is_closed = False

    @property
    def room(self) -> int:
        """Tokens that the response may still get."""
        return self.response_length - len(self.response_ids)

    @property
    def num_turns(self) -> int:
        return self.user_turns + self.assistant_turns + 1

    @property
    def last_turn(self) -> TokenOutput:
        if not self.turns:
            raise ValueError("the model has not spoken yet; call generate first")
        return self.turns[-1]

    @property
    def has_ended_turn(self) -> bool:
        """Whether the model ended its last turn itself, with a token."""
        return self.last_turn.stop_reason == "stop" and not self.sampling_params.get("stop")

    async def generate(self, max_tokens: int | None = None) -> TokenOutput:
        """Let the model speak: at most `max_tokens`, and no more than there is room for."""
        if self.room <= 0:
            raise ValueError(
                f"the response has {len(self.response_ids)} tokens, and response_length allows "
                f"{self.response_length}; check room before a turn"
            )
        wishes = (max_tokens, self.sampling_params.get("max_tokens"))
        params = {
            **self.sampling_params,
            "max_tokens": min([self.room, *(wish for wish in wishes if wish is not None)]),
        }
        if self.assistant_turns and params.get("seed") is not None:
            params["seed"] = keyed_seed(params["seed"], "turn", self.assistant_turns)
        start = time.perf_counter()
        output = await self.loop.server_manager.generate(
            self.session_id,
            prompt_ids=self.prompt_ids + self.response_ids,
            sampling_params=params,
            media=tuple(self.media),
        )
        self.metrics.generate_sequences += time.perf_counter() - start
        self.metrics.num_preempted = max(self.metrics.num_preempted, 0) + output.num_preempted
        self.response_ids += output.token_ids
        self.response_mask += [1] * len(output.token_ids)
        self.response_logprobs += output.log_probs
        self.turns.append(output)
        self.assistant_turns += 1
        return output

    def append_messages(self, messages: Sequence[Message]) -> bool:
        """Add what others said, and the beginning of the model's next turn.

        Returns False and adds nothing where that leaves no room for a token of the model, or where
        there would be more images than `rollout.limit_images`.
        """
        follow = partial(
            self.continuation.ids_after_turn,
            self.last_turn.token_ids,
            has_ended=self.has_ended_turn,
        )
        media: tuple[Media, ...] = ()
        if has_media(messages):
            try:
                ids, media = self.loop.media.encode(messages, follow)
            except UnreadableImage as error:  # the policy did not make it
                raise InfraFault(str(error), reason="image") from error
        else:
            ids = follow(messages)
        most = self.loop.media.max_images
        if len(ids) >= self.room or (most is not None and len(self.media) + len(media) > most):
            return False
        num_before = len(self.prompt_ids) + len(self.response_ids)
        self.media += [one.shifted(num_before) for one in media]
        self.append_ids(ids)
        return True

    def append_ids(self, ids: Sequence[int]) -> None:
        """Add ids that the model did not sample."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.response_logprobs += [0.0] * len(ids)
        self.user_turns += 1

    def fork(self, number: int) -> "Conversation":
        """A conversation that goes on from here by itself, with a session and seeds of its own."""
        fork = Conversation(
            self.loop,
            self.prompt_ids,
            self.sampling_params,
            continuation=self.continuation,
            response_length=self.response_length,
        )
        if fork.sampling_params.get("seed") is not None:
            fork.sampling_params["seed"] = keyed_seed(fork.sampling_params["seed"], "fork", number)
        fork.response_ids = list(self.response_ids)
        fork.response_mask = list(self.response_mask)
        fork.response_logprobs = list(self.response_logprobs)
        fork.turns = list(self.turns)
        fork.assistant_turns, fork.user_turns = self.assistant_turns, self.user_turns
        return fork

    def output(self, **fields: Any) -> AgentLoopOutput:
        """The trajectory so far; `fields` are further fields of `AgentLoopOutput`."""
        return AgentLoopOutput(
            **{
                "prompt_ids": self.prompt_ids,
                "response_ids": self.response_ids,
                "response_mask": self.response_mask,
                "response_logprobs": self.response_logprobs,
                "routed_experts": self.turns[-1].routed_experts if self.turns else None,
                "media": tuple(self.media),
                "num_turns": self.num_turns,
                "stop_reason": self.turns[-1].stop_reason if self.turns else "",
                "metrics": self.metrics,
                **fields,
            }
        )

    def close(self) -> None:
        """Let the engine drop what it keeps for the session."""
        if not self._is_closed:
            self._is_closed = True
            self.loop.server_manager.close_session(self.session_id)

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
