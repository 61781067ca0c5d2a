"""An agent loop whose responses have lengths of a heavy tail: log-normal, cut at the limit.

    actor_rollout_ref.rollout.agent.agent_loop_config_path: a list with one entry
      {name: long_tail, _target_: benchmarks.long_tail.LongTailLoop, median: 300, spread: 0.99}

A length follows from the seed of its sample, so every run and every mode has the same ones.
`spread` is the standard deviation of the logarithm; 0.99 puts the 99th percentile at ten medians.
"""

import math
import uuid
from statistics import NormalDist
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.single_turn import answer
from verl.utils.scramble import keyed_seed


def length_of(seed: int, median: int, spread: float, longest: int) -> int:
    share = (keyed_seed(seed, "length") % 10**6 + 0.5) / 10**6
    length = round(math.exp(math.log(median) + spread * NormalDist().inv_cdf(share)))
    return min(max(length, 1), longest)


class LongTailLoop(AgentLoopBase):
    """One turn of a length that its seed chooses."""

    def __init__(self, *args: Any, median: int = 300, spread: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.median, self.spread = median, spread

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        longest = self.rollout_config.response_length
        wish = length_of(sampling_params["seed"], self.median, self.spread, longest)
        output = await self.server_manager.generate(
            uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params={**sampling_params, "max_tokens": wish, "ignore_eos": True},
        )
        return answer(prompt_ids, output, 0.0)
