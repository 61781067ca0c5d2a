"""One sample of a response as it grows: its text, its log-probabilities, its end.

    ids --> Detokenizer: whole characters only --> StopCutter: nothing of a stop text --> text

Token ids come a few at a time; the pieces of text, joined, equal the decoding of all ids at once,
cut at the stop text. The same object serves responses as a whole, which are one large piece, and
responses in events.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from verl.server.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs
from verl.server.encoding import Encoder
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

    def __init__(
        self, encoder: Encoder, stops: tuple[str, ...], decode: "Decode | None" = None
    ) -> None:
        """`decode` gives the text of ids; by default, the encoder's, without special tokens."""
        self._encoder = encoder
        self._detokenizer = Detokenizer(decode or encoder.decode)
        self._cutter = StopCutter(stops)
        self._measure = Detokenizer(encoder.decode)  # token by token, to find their offsets
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


CONTEXT_TOKENS = 8
"""Tokens decoded again before the new ones: a tokenizer may treat the first ones differently."""

MAX_PENDING_TOKENS = 64
"""Tokens that may wait for the end of a character, before they are given on as they are."""

REPLACEMENT = "\ufffd"

Decode = Callable[[list[int]], str]


class Detokenizer:
    """The text of a growing list of ids.

    Text is certain up to the replacement characters at its end: these may be the first bytes of a
    character that is not whole yet.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # a few that have been given, then those that are pending
        self._num_given = 0  # characters of their text that have been given
        self._num_pending = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        self._ids += token_ids
        self._num_pending += len(token_ids)
        return self._take(self._num_pending > MAX_PENDING_TOKENS)

    def finish(self) -> str:
        """The rest, whole characters or not."""
        return self._take(True)

    def _take(self, is_last: bool) -> str:
        text = self._decode(self._ids)
        certain = text if is_last else text.rstrip(REPLACEMENT)
        new = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if len(certain) == len(text):
            self._ids = self._ids[-CONTEXT_TOKENS:]
            self._num_given = len(self._decode(self._ids))
            self._num_pending = 0
        return new


class StopCutter:
    """Lets text through up to the first stop text, which it keeps back with all that follows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [self._held.find(stop) for stop in self._stops]
        cuts = [index for index in found if index >= 0]
        self.is_stopped = bool(cuts)
        end = min(cuts) if cuts else len(self._held) - self._num_doubtful()
        text, self._held = self._held[:end], self._held[end:]
        return text

    def finish(self) -> str:
        """What was held back and turned out not to be a stop text."""
        text, self._held = ("" if self.is_stopped else self._held), ""
        return text

    def _num_doubtful(self) -> int:
        """Length of the longest end of the text with which a stop text begins."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
