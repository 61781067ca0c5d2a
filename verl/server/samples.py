"""One sample of a response as it grows: its text, its log-probabilities, its end.

The same object serves answers as a whole, which are one large piece, and answers in events.
"""

import math
from dataclasses import dataclass
from typing import Literal

from verl.server.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs
from verl.server.encoding import Encoder
from verl.server.text import REPLACEMENT, Detokenizer, StopCutter
from verl.workers.rollout.base import TokenDelta


@dataclass(frozen=True)
class Piece:
    """What a sample has got at one time."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"] | None


class Sample:
    """Turns a sample's deltas into pieces."""

    def __init__(self, encoder: Encoder, stops: tuple[str, ...]) -> None:
        self._encoder = encoder
        self._detokenizer = Detokenizer(encoder.decode)
        self._cutter = StopCutter(stops)
        self._measure = Detokenizer(encoder.decode)  # token by token, to find their places
        self._offset = 0

    def add(self, delta: TokenDelta) -> Piece:
        if not all(map(math.isfinite, delta.log_probs)):
            raise FloatingPointError("an engine gave a log-probability that is not finite")
        text = self._cutter.add(self._detokenizer.add(delta.token_ids))
        if delta.stop_reason:
            text += self._cutter.add(self._detokenizer.finish()) + self._cutter.finish()
        return Piece(text, delta.token_ids, delta.log_probs, finish_reason(delta.stop_reason))

    def completion_logprobs(self, piece: Piece) -> CompletionLogprobs:
        offsets = []
        for token in piece.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._measure.add([token]))
        return CompletionLogprobs(
            tokens=[self._encoder.token_text(token) for token in piece.token_ids],
            token_logprobs=list(piece.log_probs),
            text_offset=offsets,
        )

    def chat_logprobs(self, piece: Piece) -> ChatLogprobs:
        content = []
        for token_id, value in zip(piece.token_ids, piece.log_probs, strict=True):
            token = self._encoder.token_text(token_id)
            whole = None if REPLACEMENT in token else list(token.encode())
            content.append(ChatLogprob(token=token, logprob=value, bytes=whole))
        return ChatLogprobs(content=content)


def finish_reason(stop_reason: str) -> Literal["stop", "length", "abort"] | None:
    if stop_reason == "":
        return None
    assert stop_reason in ("stop", "length", "abort"), stop_reason
    return stop_reason
