"""Which pages make up each slot, as kernels read it: a tensor that keeps its address.

The host remembers what it has sent, and sends what has changed, a few entries a visit, before the
steps that need it. A slot that nobody has leads to nobody's page: its row may be among those of a
captured step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.utils.device import without_waiting
from verl.workers.rollout.native.page_pool import NOBODYS

HeldPages = tuple[Sequence[int], Sequence[int]]
"""Those of a prompt, and those of a sample: live lists, as `PagePool.held` gives them."""


class PageTable:
    """`pages` (slots, blocks) int32, on the device."""

    def __init__(self, num_slots: int, num_blocks: int, device: torch.device) -> None:
        self.pages = torch.full((num_slots, num_blocks), NOBODYS, dtype=torch.int32, device=device)
        self._sent = np.full((num_slots, num_blocks), NOBODYS, dtype=np.int32)
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    def update(self, held: Mapping[int, HeldPages]) -> None:
        """Let slots lead to the pages that their samples hold, and all others to nobody's."""
        changed: dict[int, Sequence[int]] = {slot: () for slot in self._known if slot not in held}
        for slot, (shared, own) in held.items():
            before, num_before = self._known.get(slot, ((), 0))
            # Who comes back gets another list, be it with as many pages.
            if before is not own or num_before != len(own):
                changed[slot] = (*shared, *own)
        self._known = {slot: (own, len(own)) for slot, (_, own) in held.items()}
        if changed:
            self._send(changed)

    def reset(self) -> None:
        """All slots lead to nobody's page, here and on the device."""
        self.pages.fill_(NOBODYS)
        self._sent.fill(NOBODYS)
        self._known = {}

    def _send(self, changed: Mapping[int, Sequence[int]]) -> None:
        slots = np.fromiter(changed, dtype=np.int64)
        wanted = np.full((len(slots), self._sent.shape[1]), NOBODYS, dtype=np.int32)
        for row, pages in zip(wanted, changed.values(), strict=True):
            row[: len(pages)] = pages
        which, blocks = np.nonzero(wanted != self._sent[slots])
        if not which.size:  # the same pages have come back to the same slots
            return
        self._sent[slots] = wanted
        entries = np.stack([slots[which], blocks, wanted[which, blocks]])
        slot, block, page = without_waiting(torch.from_numpy(entries), self.pages.device)
        self.pages[slot, block] = page.int()
