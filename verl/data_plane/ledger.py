"""The book of a data plane: which entries there are, in which state, and who waits for them.

Bookkeeping only: no columns, no locks, no clocks. Each back-end has one ledger and calls it from
one thread at a time. A waiter is a `Future`, which the ledger completes at the very call that makes
its condition true, and only then: nobody polls, and nobody wakes up in vain.

    waits for keys       found by key; counts how many are still missing
    waits for a count    in a heap per partition; only the smallest count is looked at
    takes                in a queue per partition and consumer; only the first one is looked at

So completing an entry costs the same whether ten or ten thousand wait.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count as counter

from verl.data_plane.plane import (
    KeyTaken,
    Limits,
    PlaneFull,
    PlaneLost,
    Ready,
    Receipt,
    RowsLost,
    RowsMissing,
    partition_of,
    require_key,
)


@dataclass(eq=False)
class Waiter:
    ready: Ready | None
    future: "Future[list[Receipt]]" = field(default_factory=Future)
    num_missing: int = 0
    count: int = 0


@dataclass
class Consumer:
    queue: deque[tuple[str, int]] = field(default_factory=deque)
    """Complete entries that it was not given yet: key and number of the entry."""

    waiters: deque[Waiter] = field(default_factory=deque)


@dataclass
class Partition:
    complete: dict[str, None] = field(default_factory=dict)
    by_count: list[tuple[int, int, Waiter]] = field(default_factory=list)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)


class Ledger:
    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.num_wakes = 0
        self.num_bytes = 0
        self._entries: dict[str, Receipt] = {}
        self._number_of: dict[str, int] = {}  # tells an entry from an earlier one of that key
        self._partitions: dict[str, Partition] = {}
        self._by_key: dict[str, list[Waiter]] = {}
        self._numbers = counter()
        self.num_waiting = 0
        self._end = ""

    # ---- entries ---------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[str], producer: str) -> None:
        self._require_running()
        for key in keys:
            require_key(key, self.limits)
            self._require_free(key)
        if len(self._entries) + len(keys) > self.limits.max_keys:
            raise self._full(f"{len(keys)} more keys", "keys", self.limits.max_keys)
        for key in keys:
            self._add(Receipt(key=key, state="open", producer=producer))

    def complete(self, receipt: Receipt) -> None:
        """Put an entry, new or reserved, and wake who waits for it."""
        self.check(receipt)
        key = receipt.key
        if key not in self._entries:
            self._add(receipt)
        self._entries[key] = receipt
        self.num_bytes += receipt.num_bytes
        partition = self._partitions[partition_of(key)]
        partition.complete[key] = None
        for waiter in self._by_key.pop(key, []):
            waiter.num_missing -= 1
            if not waiter.num_missing:
                self._wake(waiter, self._receipts(waiter))
        heap = partition.by_count
        while heap and (heap[0][2].future.done() or heap[0][0] <= len(partition.complete)):
            waiter = heapq.heappop(heap)[2]
            if not waiter.future.done():
                self._wake(waiter, self._receipts(waiter))
        for consumer in partition.consumers.values():
            consumer.queue.append((key, self._number_of[key]))
            self._serve(consumer)

    def check(self, receipt: Receipt) -> None:
        """Raise what `complete` would; for a back-end that must know before it stores columns."""
        self._require_running()
        present = self._entries.get(receipt.key)
        if present is not None and present.state == "complete":
            self._require_free(receipt.key)
        if present is None and len(self._entries) >= self.limits.max_keys:
            raise self._full("one more key", "keys", self.limits.max_keys)
        if self.num_bytes + receipt.num_bytes > self.limits.max_bytes:
            raise self._full(
                f"{receipt.num_bytes:,} bytes of {receipt.key!r}", "bytes", self.limits.max_bytes
            )

    def lose(self, producer: str) -> list[str]:
        keys = [
            key
            for key, entry in self._entries.items()
            if entry.state == "open" and entry.producer == producer
        ]
        for key in keys:
            self._entries[key] = replace(self._entries[key], state="lost")
        for key in keys:
            for waiter in self._by_key.pop(key, []):
                self._fail(waiter, self._lost([key]))
        return keys

    def delete(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that were there."""
        found = [key for key in dict.fromkeys(keys) if key in self._entries]
        for key in found:
            entry = self._entries.pop(key)
            self.num_bytes -= entry.num_bytes
            name = partition_of(key)
            partition = self._partitions[name]
            partition.complete.pop(key, None)
            del partition.keys[key], self._number_of[key]
            self._drop_if_unused(name)
        for key in keys:
            for waiter in self._by_key.pop(key, []):
                text = f"data plane {self.name!r}: {key!r} was deleted while somebody waited for it"
                self._fail(waiter, RowsMissing(text))
        return found

    def entries(self, partition: str) -> dict[str, Receipt]:
        self._require_running()
        if not partition:
            return dict(self._entries)
        known = self._partitions.get(partition)
        return {} if known is None else {key: self._entries[key] for key in known.keys}

    def entry(self, key: str) -> Receipt:
        return self._entries[key]

    def has_open(self, producer: str) -> bool:
        return any(e.state == "open" and e.producer == producer for e in self._entries.values())

    def require_complete(self, keys: Sequence[str]) -> None:
        self._require_running()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                raise RowsMissing(
                    f"data plane {self.name!r} has no {key!r}: it was never put, or was deleted"
                )
            if entry.state == "lost":
                raise self._lost([key])
            if entry.state == "open":
                raise RowsMissing(
                    f"data plane {self.name!r}: {key!r} is not complete; "
                    f"{entry.producer or 'its producer'} has reserved it and not put it yet"
                )

    # ---- waiters ---------------------------------------------------------------------------------

    def watch(self, ready: Ready) -> "Future[list[Receipt]]":
        self._require_running()
        waiter = Waiter(ready)
        lost = [k for k in ready.keys if k in self._entries and self._entries[k].state == "lost"]
        if lost:
            waiter.future.set_exception(self._lost(lost))
            return waiter.future
        partition = self._partition(ready.partition)
        missing = [key for key in dict.fromkeys(ready.keys) if not self._is_complete(key)]
        if missing or len(partition.complete) < ready.count:
            self._admit()
            waiter.num_missing = len(missing)
            for key in missing:
                self._by_key.setdefault(key, []).append(waiter)
            if ready.count:
                heapq.heappush(partition.by_count, (ready.count, next(self._numbers), waiter))
        else:
            waiter.future.set_result(self._receipts(waiter))
        return waiter.future

    def take(self, name: str, count: int, partition_name: str) -> "Future[list[Receipt]]":
        self._require_running()
        if count < 1:
            raise ValueError(f"take at least 1 entry, not {count}")
        partition = self._partition(partition_name)
        if name not in partition.consumers:
            if len(partition.consumers) >= self.limits.max_waiters:
                raise self._full("one more consumer", "consumers", self.limits.max_waiters)
            queue = deque((key, self._number_of[key]) for key in partition.complete)
            partition.consumers[name] = Consumer(queue)
        consumer, waiter = partition.consumers[name], Waiter(None, count=count)
        self._admit()
        consumer.waiters.append(waiter)
        before = self.num_wakes
        self._serve(consumer)
        self.num_wakes = before if waiter.future.done() else self.num_wakes  # it never slept
        return waiter.future

    def forget(self, future: "Future[list[Receipt]]") -> None:
        """A waiter has given up."""
        if future.cancel():
            self.num_waiting -= 1
        for key, waiters in list(self._by_key.items()):
            kept = [waiter for waiter in waiters if waiter.future is not future]
            if not kept:
                del self._by_key[key]
            elif len(kept) < len(waiters):
                self._by_key[key] = kept
        for name, partition in list(self._partitions.items()):
            partition.by_count = [one for one in partition.by_count if one[2].future is not future]
            heapq.heapify(partition.by_count)
            for consumer in partition.consumers.values():
                if consumer.waiters and any(w.future is future for w in consumer.waiters):
                    consumer.waiters = deque(w for w in consumer.waiters if w.future is not future)
                    self._serve(consumer)  # the next one may want fewer
            self._drop_if_unused(name)

    def shortfall(self, ready: Ready) -> str:
        """What is missing, for the error of a wait that took too long."""
        if ready.keys:
            missing = [key for key in ready.keys if not self._is_complete(key)]
            states = []
            for key in missing[:4]:
                entry = self._entries.get(
                    key, Receipt(key=key, state="open", producer="nobody yet")
                )
                states.append(f"{key!r} ({entry.state}, by {entry.producer or 'unnamed'})")
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            return f"{len(missing)} of {len(ready.keys)} keys: {', '.join(states)}{more}"
        entries = self.entries(ready.partition).values()
        found = {state: sum(e.state == state for e in entries) for state in ("open", "lost")}
        num_complete = sum(entry.state == "complete" for entry in entries)
        return (
            f"{ready.count} complete entries of partition {ready.partition!r}: there are "
            f"{num_complete}, {found['open']} are open and {found['lost']} lost"
        )

    def end(self, reason: str) -> None:
        """Everything is gone; who waits and who asks from now on is told the reason."""
        self._end = reason
        for waiter in self._waiters():
            self._fail(waiter, PlaneLost(f"data plane {self.name!r} {reason}"))
        self._entries.clear()
        self._partitions.clear()
        self._by_key.clear()

    def _require_running(self) -> None:
        if self._end:
            raise PlaneLost(f"data plane {self.name!r} {self._end}")

    # ---- helpers ---------------------------------------------------------------------------------

    def _add(self, receipt: Receipt) -> None:
        self._entries[receipt.key] = receipt
        self._number_of[receipt.key] = next(self._numbers)
        self._partition(partition_of(receipt.key)).keys[receipt.key] = None

    def _partition(self, name: str) -> Partition:
        return self._partitions.setdefault(name, Partition())

    def _drop_if_unused(self, name: str) -> None:
        partition = self._partitions[name]
        is_watched = partition.by_count or any(c.waiters for c in partition.consumers.values())
        if not partition.keys and not is_watched:
            del self._partitions[name]

    def _serve(self, consumer: Consumer) -> None:
        """Give the first waiters their entries; those that were deleted meanwhile are skipped."""
        queue = consumer.queue
        while consumer.waiters and len(queue) >= consumer.waiters[0].count:
            given: list[tuple[str, int]] = []
            while queue and len(given) < consumer.waiters[0].count:
                key, number = queue.popleft()
                if self._number_of.get(key) == number:
                    given.append((key, number))
            if len(given) < consumer.waiters[0].count:
                queue.extendleft(reversed(given))
                return
            self._wake(consumer.waiters.popleft(), [self._entries[key] for key, _ in given])

    def _receipts(self, waiter: Waiter) -> list[Receipt]:
        assert waiter.ready is not None
        if waiter.ready.keys:
            return [self._entries[key] for key in waiter.ready.keys]
        return [self._entries[key] for key in self._partitions[waiter.ready.partition].complete]

    def _is_complete(self, key: str) -> bool:
        return key in self._entries and self._entries[key].state == "complete"

    def _admit(self) -> None:
        if self.num_waiting >= self.limits.max_waiters:
            raise self._full("one more waiter", "waiters", self.limits.max_waiters)
        self.num_waiting += 1

    def _wake(self, waiter: Waiter, receipts: list[Receipt]) -> None:
        self.num_waiting -= 1
        self.num_wakes += 1
        waiter.future.set_result(receipts)

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        if not waiter.future.done():
            self.num_waiting -= 1
            self.num_wakes += 1
            waiter.future.set_exception(error)

    def _waiters(self) -> Iterator[Waiter]:
        for waiters in self._by_key.values():
            yield from waiters
        for partition in self._partitions.values():
            yield from (waiter for _, _, waiter in partition.by_count)
            for consumer in partition.consumers.values():
                yield from consumer.waiters

    def _require_free(self, key: str) -> None:
        if key in self._entries:
            entry = self._entries[key]
            raise KeyTaken(
                f"data plane {self.name!r}: {key!r} is there already ({entry.state}, by "
                f"{entry.producer or 'an unnamed producer'}); a key is put once, delete it first"
            )

    def _lost(self, keys: Sequence[str]) -> RowsLost:
        entry = self._entries[keys[0]]
        return RowsLost(
            f"data plane {self.name!r}: {keys[0]!r} was never completed, its producer "
            f"{entry.producer or '(unnamed)'} is gone; delete the key and produce it again"
        )

    def _full(self, wanted: str, what: str, limit: int) -> PlaneFull:
        return PlaneFull(
            f"data plane {self.name!r} is full: {wanted} would pass its limit of {limit:,} {what}; "
            f"it holds {len(self._entries):,} keys and {self.num_bytes:,} bytes. Delete what has "
            "been consumed, or raise the limit"
        )
