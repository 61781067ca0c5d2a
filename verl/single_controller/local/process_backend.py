"""Ranks as child processes of the driver.

The processes start together, each with its own `RANK` and a common `MASTER_ADDR`/`MASTER_PORT`, and
the back-end is ready when every worker object has been constructed. An argument that several ranks
get is packed once. See `rank_process` for who waits for whom.
"""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from verl.single_controller.base import process_probe
from verl.single_controller.base.answers import wait_for_answers
from verl.single_controller.base.backend import Backend, Call, Outcome, Share
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.local.future import LocalFuture, finished_positions
from verl.single_controller.local.messages import CONSTRUCT
from verl.single_controller.local.parcel import Parcel
from verl.single_controller.local.rank_process import Outgoing, RankProcess

STOP_SECONDS = 5.0
"""How long workers may take to end on their own at shutdown before they are killed."""


class ProcessBackend(Backend):
    reference_type = LocalFuture

    def __init__(
        self, construct: Call, spec: ClassWithInitArgs, variables: Sequence[dict[str, str]]
    ) -> None:
        """Start a process per entry of `variables`, its environment, within `construct`'s time."""
        super().__init__()
        parcel = Parcel.of(spec, f"worker class {spec.worker_class.__qualname__}")
        self._changed = threading.Condition()
        self._ranks: list[RankProcess] = []
        self.workers = self._ranks
        self._finalizer = weakref.finalize(
            self, end_processes, self._ranks, self.is_closed, os.getpid()
        )
        try:
            for rank, own in enumerate(variables):
                self._ranks.append(RankProcess(rank, own, spec.modules))
            shares = [Share(rank, (parcel,), {}) for rank in range(len(variables))]
            references = self.submit(construct, CONSTRUCT, shares)
            wait_for_answers(self, construct, range(len(variables)), references)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, call: Call, method: str, shares: Sequence[Share]) -> list[Any]:
        parcels: dict[int, Any] = {}  # by identity: what ranks share is packed once

        def ready(value: Any) -> Any:
            if id(value) not in parcels:
                parcels[id(value)] = _packed_now(value, call)
            return parcels[id(value)]

        requests = [
            Outgoing(
                future=LocalFuture(call, rank, self, self._changed),
                method=method,
                args=[ready(value) for value in args],
                kwargs={key: ready(value) for key, value in kwargs.items()},
            )
            for rank, args, kwargs in shares
        ]
        # Only now: what cannot be packed must not leave some ranks with a call and others without.
        for (rank, _, _), request in zip(shares, requests, strict=True):
            self._ranks[rank].submit(request)
        return [request.future for request in requests]

    def wait(self, references: Sequence[Any], timeout_seconds: float) -> list[int]:
        return finished_positions(references, self._changed, timeout_seconds)

    def outcomes(self, references: Sequence[LocalFuture]) -> list[Outcome]:
        return [reference.outcome for reference in references]

    def stopped_ranks(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if process_probe.is_stopped(self._ranks[rank].pid)]

    def stack_of(self, rank: int) -> str:
        address = self._ranks[rank].address
        if address is None:
            return "it has not started yet"
        return process_probe.stack_of(address)

    def dead_ranks(self) -> list[int]:
        return [rank.rank for rank in self._ranks if rank.death is not None]

    def label(self, rank: int) -> str:
        return f"rank {rank} (pid {self._ranks[rank].pid})"

    def shutdown(self) -> None:
        self._finalizer()


def _packed_now(value: Any, call: Call) -> Any:
    """Values are packed when the call is made, so later changes do not matter; futures later."""
    if isinstance(value, (Parcel, LocalFuture)):
        return value
    return Parcel.of(value, f"an argument of {call.method}, a {type(value).__name__},")


def end_processes(ranks: list[RankProcess], is_closed: threading.Event, driver_pid: int) -> None:
    """Ask all to end, then kill those that have not; also runs at interpreter exit."""
    if os.getpid() != driver_pid:  # a fork of the driver must not end its workers
        return
    is_closed.set()
    for rank in ranks:
        rank.stop()
    give_up = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, give_up - time.monotonic()))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.process.join(1.0)
