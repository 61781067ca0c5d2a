"""A back-end without workers: each rank answers what a script says, when it says so."""

import time

from verl.single_controller import WorkerGroup
from verl.single_controller.base.backend import Backend, Outcome
from verl.single_controller.base.failures import Failure


class ScriptedBackend(Backend):
    """`script[rank]` is (seconds until the answer, outcome); the answer may never come (None)."""

    reference_type = int
    probe_seconds = 0.1

    def __init__(self, script):
        super().__init__()
        self.script = script
        self.workers = list(range(len(script)))
        self.stopped = []
        self.rank_calls = []
        self.num_put = 0
        self.start = time.monotonic()

    def submit(self, call, method, rank_calls):
        self.rank_calls = list(rank_calls)
        self.start = time.monotonic()
        return [rank_call.rank for rank_call in rank_calls]

    def wait(self, references, timeout_seconds):
        give_up = time.monotonic() + timeout_seconds
        while True:
            now = time.monotonic()
            done = [i for i, rank in enumerate(references) if self._is_due(rank, now)]
            if done or now >= give_up:
                return done
            time.sleep(0.005)

    def _is_due(self, rank, now):
        return self.script[rank] is not None and now - self.start >= self.script[rank][0]

    def outcomes(self, references):
        return [self.script[rank][1] for rank in references]

    def stopped_ranks(self, ranks):
        return [rank for rank in ranks if rank in self.stopped]

    def stack_of(self, rank):
        return f"stack {rank}"

    def deaths(self):
        return {}

    def label(self, rank):
        return f"rank {rank}"

    def shutdown(self):
        self.is_closed.set()

    def share(self, parts):
        self.num_put += len(parts)
        return parts


def answer(value, after=0.0):
    return after, Outcome(value)


def failure(text, after=0.0, is_death=False):
    return after, Outcome(failure=Failure(text, f"trace of {text}", is_death=is_death))


def scripted_group(script, **options):
    return WorkerGroup(
        None, backend=ScriptedBackend(script), worker_class=None, name="scripted", **options
    )
