"""Which pages of the memory for keys and values belong to whom. No tensors.

A page has room for `PAGE` consecutive tokens of one sequence, in every layer. Whoever holds pages
(a prompt, a continuation) gives all of them back at once. Page 0 is nobody's: rows of a step that
no sequence has write there, where it does no harm.
"""

from collections.abc import Hashable, Sequence

PAGE = 64
"""Tokens of a page: a block that attention visits, so that a block lies in one page."""

NOBODYS = 0


class PagePool:
    """`num_pages` pages, `NOBODYS` among them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.clear()

    @property
    def capacity(self) -> int:
        """Pages that can be held at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, holder: Hashable, num_pages: int) -> None:
        """Give somebody more pages, behind those that it has; there must be so many."""
        assert 0 <= num_pages <= self.num_free, f"{num_pages} of {self.num_free} pages are wanted"
        pages = self._held.setdefault(holder, [])
        for _ in range(num_pages):
            pages.append(self._free.pop())

    def held(self, holder: Hashable) -> Sequence[int]:
        """The pages of somebody who has taken some, in the order in which they were taken.

        It is the same object until they are given back, and grows with them.
        """
        return self._held[holder]

    def give_back(self, holder: Hashable) -> None:
        """All that somebody has taken; it must have."""
        self._free += self._held.pop(holder)

    def clear(self) -> None:
        """Nobody holds anything."""
        self._held: dict[Hashable, list[int]] = {}
        self._free = [page for page in reversed(range(self.num_pages)) if page != NOBODYS]


def pages_for(num_tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-num_tokens // PAGE)
