"""What one sample has got so far, and where it ends by rules that SGLang does not apply.

SGLang is given no tokenizer, so texts that end a response are watched here; and with `ignore_eos`
it looks at no stop token at all, though only the model's own are to be ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.base import SamplingParams, TokenDelta
from verl.workers.rollout.native.sequence import tokens_until_stop


@dataclass
class RunningSample:
    """A sample of a request; `take` follows it from message to message."""

    index: int
    params: SamplingParams
    decode_text: Callable[[list[int]], str]
    is_over: bool = False
    token_ids: list[int] = field(default_factory=list)
    """Kept only where a text may end it."""

    def take(self, message: Mapping[str, Any]) -> TokenDelta:
        """The new tokens of a message of the server; `is_over` afterwards if it ended."""
        facts = message["meta_info"]
        drawn = [(int(token), float(value)) for value, token, _ in facts["output_token_logprobs"]]
        if [token for token, _ in drawn] != message["output_ids"]:
            raise RuntimeError(
                f"SGLang sent tokens {message['output_ids']} of sample {facts['id']}, but "
                f"log-probabilities of {[token for token, _ in drawn]}; it is not the version that "
                "this protocol was written for, or --incremental-streaming-output is off"
            )
        stop_reason = stop_reason_of(facts)
        end = self._end_among([token for token, _ in drawn])
        if end is not None:
            drawn, stop_reason = drawn[:end], "stop"
        self.is_over = bool(stop_reason)
        return TokenDelta(
            sample=self.index,
            token_ids=tuple(token for token, _ in drawn),
            log_probs=tuple(value for _, value in drawn),
            policy_versions=(),
            stop_reason=stop_reason,
        )

    def _end_among(self, new: list[int]) -> int | None:
        """How many of the new tokens belong to the response if it ends with one of them."""
        ends = []
        if self.params.ignore_eos:
            ends = [i + 1 for i, token in enumerate(new) if token in self.params.stop_token_ids]
        if self.params.stop:
            self.token_ids += new
            total = tokens_until_stop(self.token_ids, len(new), self.params.stop, self.decode_text)
            if total is not None:
                ends.append(total - (len(self.token_ids) - len(new)))
        return min(ends, default=None)


def stop_reason_of(facts: Mapping[str, Any]) -> str:
    """`stop`, `length`, `abort`, or nothing while it runs. An abort with a status is SGLang's own
    refusal, for which nobody here asked."""
    reason = facts["finish_reason"]
    if reason is None:
        return ""
    if reason["type"] == "abort" and {"status_code": None, **reason}["status_code"] is not None:
        raise RuntimeError(f"SGLang gave sample {facts['id']} up: {reason}")
    return reason["type"]
