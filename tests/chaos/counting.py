"""A worker that counts how often each of its calls ran."""

from collections import Counter
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker


class Counting(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def count(self, number: int) -> int:
        self.counts[number] += 1
        return number

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> dict[str, Any]:
        repeated = [number for number, times in self.counts.items() if times > 1]
        return {"calls": len(self.counts), "repeated": repeated}
