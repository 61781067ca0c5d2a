"""Keys and values of finished turns, kept for the next turn of the same session.

A finished sequence frees its slots, so its keys and values are copied out, and joined to the new
tokens when a prompt that begins the same way comes. Memory is bounded: the least recently used
session is evicted first. A change of the weights must `clear` the store.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.workers.rollout.native.cache import KeysAndValues


@dataclass(frozen=True)
class KnownTokens:
    """Tokens and, per layer, their keys and values (tokens, KV heads, head dim)."""

    token_ids: list[int] = field(default_factory=list)
    layers: list[KeysAndValues] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in self.layers for x in pair)

    def prefix(self, num_tokens: int) -> "KnownTokens":
        layers = [(keys[:num_tokens], values[:num_tokens]) for keys, values in self.layers]
        return KnownTokens(self.token_ids[:num_tokens], layers)


class SessionStore:
    """Sessions by name, at most `max_bytes` of keys and values."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._sessions: OrderedDict[str, KnownTokens] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, session_id: str, known: KnownTokens) -> None:
        """Keep a finished turn in place of the one before, unless it alone is too large."""
        self.close(session_id)
        if known.num_bytes > self.max_bytes:
            return
        while self.num_bytes + known.num_bytes > self.max_bytes:
            self.close(next(iter(self._sessions)))
        self._sessions[session_id] = known
        self.num_bytes += known.num_bytes

    def take(self, session_id: str, prompt_ids: Sequence[int]) -> KnownTokens:
        """The part of the prompt that is known; the turn that runs now will bring it back.

        The last token of the prompt is never part of it: its logits are yet to be computed.
        """
        known = self.close(session_id)
        most = min(len(known.token_ids), len(prompt_ids) - 1)
        return known.prefix(num_equal(known.token_ids[:most], prompt_ids[:most]))

    def close(self, session_id: str) -> KnownTokens:
        """Drop a session and return what was kept for it."""
        known = self._sessions.pop(session_id, KnownTokens())
        self.num_bytes -= known.num_bytes
        return known

    def clear(self) -> None:
        self._sessions.clear()
        self.num_bytes = 0


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    for count, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return count
    return len(left)
