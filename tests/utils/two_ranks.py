"""Two or more real processes that meet in a gloo group, for tests of what ranks do together."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
from verl.utils.environment import set_variable


def run_on_two_ranks(work: Callable[[int], Any], folder: Path, seconds: float = 100) -> list[Any]:
    return run_on_ranks(2, work, folder, seconds)


def run_on_ranks(
    num_ranks: int, work: Callable[[int], Any], folder: Path, seconds: float = 100
) -> list[Any]:
    """What `work(rank)` returned on each rank; an error on a rank is raised here.

    The ranks are forked, which takes no time; they use one thread, the only number that is safe
    after a fork. What they return must not hold tensors, whose memory ends with the rank.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=_rank, args=(work, rank, num_ranks, str(folder / "store"), sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        answers = []
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(seconds):
                raise TimeoutError(f"rank {rank} gave no answer in {seconds} seconds")
            answers.append(receiver.recv())
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _rank(work: Callable[[int], Any], rank: int, num_ranks: int, store: str, sender: Any) -> None:
    torch.set_num_threads(1)
    for name, value in ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", num_ranks):
        set_variable(name, str(value))
    set_variable("VERL_FORCE_DEVICE", "cpu")
    set_variable("DIST_INIT_METHOD", f"file://{store}")
    try:
        assert initialize_global_process_group(timeout_second=60) == (rank, rank, num_ranks)
        answer = work(rank)
        if dist.is_initialized():  # the work may have left the group itself
            dist.barrier()
        destroy_global_process_group()
    except Exception as error:
        answer = error
    sender.send(answer)
