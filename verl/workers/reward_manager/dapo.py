"""`DAPORewardManager`: the score of a response, less a penalty for being too long.

Soft overlong punishment (arXiv:2503.14476, section 3.4): within the last `len` tokens below the
longest allowed response the penalty grows from 0 to `penalty_factor`,

    min(0, -(length - (max_resp_len - len)) / len * penalty_factor)

so that a model learns to stop before it is cut off.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.response import Response
from verl.workers.reward_manager.results import Grade, Score


class DAPORewardManager(NaiveRewardManager):
    """`overlong_buffer_cfg` has `enable`, `len`, `penalty_factor` and `log`; None is no penalty."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg
        self._has_penalty = overlong_buffer_cfg is not None and bool(overlong_buffer_cfg["enable"])
        if self._has_penalty:
            self._check(overlong_buffer_cfg or {}, max_resp_len)

    async def judge(self, response: Response) -> Grade:
        grade = await super().judge(response)
        if not self._has_penalty or not isinstance(grade, Score):
            return grade
        penalty = self.penalty(response.num_tokens)
        extras = dict(grade.extras)
        if (self.overlong_buffer_cfg or {}).get("log", False):
            extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return Score(grade.value + penalty, extras)

    def penalty(self, num_tokens: int) -> float:
        """0 or less, for a response of that length."""
        buffer = self.overlong_buffer_cfg
        assert buffer is not None
        assert self.max_resp_len is not None
        excess = num_tokens - (self.max_resp_len - buffer["len"])
        return min(0.0, -excess / buffer["len"] * buffer["penalty_factor"])

    @staticmethod
    def _check(buffer: Mapping[str, Any], max_resp_len: int | None) -> None:
        where = "reward_model.reward_kwargs"
        missing = {"len", "penalty_factor"} - buffer.keys()
        if missing:
            raise ValueError(f"{where}.overlong_buffer_cfg lacks {sorted(missing)}")
        if max_resp_len is None or not 0 < buffer["len"] <= max_resp_len:
            raise ValueError(
                f"{where}.overlong_buffer_cfg.len is {buffer['len']}; it must be above 0 and at "
                f"most {where}.max_resp_len, which is {max_resp_len}"
            )
