"""An agent loop whose turns have very different lengths, with a reply of a tool between two."""

import os
import uuid
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.journal import journalled
from verl.utils.scramble import keyed_seed


class UnevenLoop(AgentLoopBase):
    """Turns of 1 to 3 tokens, and now and then one of many."""

    def __init__(
        self,
        *args: Any,
        num_turns: int = 1,
        longest: int = 20,
        is_random: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.num_turns, self.longest, self.is_random = num_turns, longest, is_random

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        seed, room = sampling_params["seed"], self.rollout_config.response_length
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        session = uuid.uuid4().hex
        for turn in range(self.num_turns):
            if turn:
                reply = await journalled("dice", {"turn": turn}, self.dice(seed, turn))
                ids, mask, log_probs = [*ids, reply], [*mask, 0], [*log_probs, 0.0]
            draw = keyed_seed(seed, "length", turn)
            wish = 1 + draw % 3 if draw % 16 < 13 else 4 + draw // 16 % self.longest
            output = await self.server_manager.generate(
                session,
                prompt_ids=[*prompt_ids, *ids],
                sampling_params={
                    **sampling_params,
                    "max_tokens": min(wish, room - len(ids)),
                    "seed": keyed_seed(seed, "turn", turn),
                },
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            if room - len(ids) < 2:
                break
        self.server_manager.close_session(session)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=2 * self.num_turns,
        )

    def dice(self, seed: int, turn: int) -> Any:
        async def roll() -> int:
            drawn = os.urandom(1)[0] if self.is_random else keyed_seed(seed, "reply", turn)
            return 3 + drawn % 8

        return roll
