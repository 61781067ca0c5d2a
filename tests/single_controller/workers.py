"""Worker classes for the tests; top level, so that worker processes can import them."""

import asyncio
import ctypes
import gc
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist

from verl import DataProto
from verl.single_controller import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import line
from verl.utils.distributed import initialize_global_process_group
from verl.utils.tensordict_utils import get_tensordict


def dispatch_reversed(worker_group, values):
    """A user's own dispatch: rank i gets the value at the other end."""
    return (list(reversed(values)),), {}


def collect_sum(worker_group, output):
    return sum(output)


class Calculator(Worker):
    """One method for each way to be called.

    In the mesh "pairs" two neighbours share a part and the first of them answers; in "mirror" every
    rank has a part of its own, and higher ranks hold earlier parts.
    """

    def __init__(self, offset=0):
        super().__init__()
        self.offset = offset
        self.calls = 0
        self._register_dispatch_collect_info("pairs", self.rank // 2, self.rank % 2 == 0)
        self._register_dispatch_collect_info("mirror", self.world_size - 1 - self.rank, True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def mark(self, batch):
        rows = batch.batch["x"]
        return DataProto.from_dict({"x": rows, "rank": torch.full_like(rows, self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mirror"))
    def mark_mirrored(self, batch):
        rows = batch.batch["x"]
        return DataProto.from_dict({"x": rows, "rank": torch.full_like(rows, self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mirror"), blocking=False)
    def increment_later(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] + 1})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def triple_tensordict(self, batch):
        return get_tensordict({"x": batch["x"] * 3})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("absent"))
    def on_absent_mesh(self, batch):
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, number, more=0):
        return number + more + self.offset + self.rank

    @register()
    def pass_through(self, values):
        return self.rank, values

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def square(self, number):
        return number * number

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch):
        return doubled(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, batch):
        return doubled(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def two_batches(self, left, right):
        return DataProto.from_dict({"x": left.batch["x"] + right.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_rows(self, batch):
        return len(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rank_zero_of_all(self, number):
        return self.rank, number

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, values):
        return self.rank, values

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self):
        return None

    @register(dispatch_mode={"dispatch_fn": dispatch_reversed, "collect_fn": collect_sum})
    def weigh(self, value):
        return value * (self.rank + 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=("x", "label"))
    def seen_columns(self, batch):
        names = sorted([*batch.batch.keys(), *batch.non_tensor_batch])
        rows = len(batch)
        return DataProto.from_dict(
            {"x": batch.batch["x"]}, {"seen": [",".join(names)] * rows}, dict(batch.meta_info)
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def add_soon(self, number):
        await asyncio.sleep(0.001)
        return number + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def add_later(self, number):
        return number + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collects_garbage(self):
        return gc.isenabled()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, name):
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def folder_and_words(self, words):
        print(words, flush=True)
        return os.getcwd()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def draw(self):
        return random.random(), np.random.rand()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, ranks, message="no rows"):
        if self.rank in ranks:
            raise ValueError(f"{message} on rank {self.rank}")
        return "fine"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_on(self, ranks, seconds):
        if self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_the_interpreter(self, seconds):
        ctypes.PyDLL(None).sleep(seconds)  # no other thread of this process runs meanwhile

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_what_cannot_travel(self):
        raise Untransportable(lambda: None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def return_what_cannot_travel(self):
        return lambda: None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exit_with(self, code):
        raise SystemExit(code)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def count_calls(self, batch):
        self.calls += 1
        return DataProto.from_dict({"calls": torch.full((len(batch),), self.calls)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self, number):
        initialize_global_process_group()
        total = torch.tensor([float(number + self.rank)])
        dist.all_reduce(total)
        return total.item()


class Counted:
    """Counts how often it is packed in this process."""

    num_packed = 0

    def __reduce__(self):
        Counted.num_packed += 1
        return Counted, ()


class Untransportable(Exception):
    """Holds something that cannot be pickled."""


def doubled(batch):
    return DataProto.from_dict(
        {"x": batch.batch["x"] * 2}, meta_info={"metrics": {"n": len(batch)}}
    )


def rows_and_rank(worker, batch):
    """For `execute_with_func_generator`."""
    return DataProto.from_dict({"x": batch.batch["x"] + 10 * worker.rank})


def product(left, right):
    """For `execute_func_rank_zero`."""
    return left * right


class Actor(Worker):
    def __init__(self, name="actor"):
        super().__init__()
        self.name = name
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self):
        return f"{self.name} {self.rank}"

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_flag(self):
        return os.environ.get("DISABLE_WORKER_INIT")


class Critic(Worker):
    def __init__(self, base):
        super().__init__()
        self.base = base

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self):
        return f"critic {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value(self):
        return self.base + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_actor(self):
        return self.get_fused_worker_by_name("actor").who()


class AsyncCritic(Critic):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def value_soon(self):
        await asyncio.sleep(0.001)
        return self.base + self.rank


class FailsToStart(Worker):
    def __init__(self, rank):
        super().__init__()
        if self.rank == rank:
            raise ValueError("no weights")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ready(self):
        return True


class Forks(Worker):
    """Its method forks, and the fork comes back through the frames of the rank before it does."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer(self, value, how):
        child = os.fork()
        if child == 0:
            if how == "raise":
                raise ValueError("in a fork")
            if how == "exit":
                raise SystemExit(0)
            return "from a fork"
        os.waitpid(child, 0)
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def speak(self, number, body):
        """Say something that nobody has asked for."""
        (end,) = [end for end in line._ends if end.fileno() >= 0]
        end.sendall(line.header_of(number, body) + body)
        return "asked"
