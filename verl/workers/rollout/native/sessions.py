"""Keys and values of finished turns, kept for the next turn of the same session.

With kernels they stay where they are: the session holds the memory of its last turn until its next
one takes it over (`pages.KernelBudget`). In plain torch, where running sequences lie side by side,
they are copied out, and joined to the new tokens when a prompt that begins the same way comes;
copies take at most `max_bytes`. Either way the least recently used session is evicted first. A
change of the weights must `clear` the store.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from verl.workers.rollout.native.sequence import Group, KeptMemory, KnownTokens

__all__ = ["KnownTokens", "SessionStore", "num_equal"]


class SessionStore:
    """Sessions by name; `release` gives back the memory of the cache that one holds."""

    def __init__(
        self, max_bytes: int, release: Callable[[KeptMemory], None] = lambda kept: None
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._release = release
        self._sessions: OrderedDict[str, KnownTokens] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, session_id: str, known: KnownTokens) -> None:
        """Keep a finished turn in place of the one before, unless it alone is too large."""
        self.close(session_id)
        if known.num_bytes > self.max_bytes:
            return
        while self.num_bytes + known.num_bytes > self.max_bytes:
            self.evict()
        self._sessions[session_id] = known
        self.num_bytes += known.num_bytes

    def touch(self, session_id: str) -> None:
        """Count a session as used: its next turn waits."""
        if session_id in self._sessions:
            self._sessions.move_to_end(session_id)

    def find(self, group: Group) -> KnownTokens:
        """The part of a group's prompt that is known from its session, which keeps it.

        The last token of the prompt is never part of it: its logits are yet to be computed.
        """
        known = self._sessions.get(group.session_id or "")
        if known is None:
            return KnownTokens()
        most = min(len(known.token_ids), len(group.prompt_ids) - 1)
        return known.prefix(num_equal(known.token_ids[:most], group.identity[:most]))

    def take(self, group: Group) -> None:
        """Let a group that is admitted have what its session kept; what it does not use is freed.

        The turn that runs now will bring it back.
        """
        if group.session_id is None:
            return
        known = self._sessions.pop(group.session_id, None)
        if known is not None:
            self.num_bytes -= known.num_bytes
            if known.kept is not None and group.known.kept is None:
                self._release(known.kept)

    def close(self, session_id: str) -> None:
        """Drop a session; an unknown one is no error."""
        known = self._sessions.pop(session_id, None)
        if known is not None:
            self.num_bytes -= known.num_bytes
            if known.kept is not None:
                self._release(known.kept)

    def evict(self) -> bool:
        """Drop the least recently used session; False if there is none."""
        if not self._sessions:
            return False
        self.close(next(iter(self._sessions)))
        return True

    def clear(self) -> None:
        while self.evict():
            pass


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences of one length have in common from the start."""
    if left == right:  # the usual case, at once
        return len(left)
    for count, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return count
    return len(left)
