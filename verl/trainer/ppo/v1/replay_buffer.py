"""`ReplayBuffer`: groups that wait in a data plane until a step trains on them.

    producer:  plane.reserve(["train/7-0", ...])
               plane.put("train/7-0", columns, {"global_steps": 6})
    trainer:   buffer.sample(global_steps=7, partition_id="train", batch_size=32)

The next groups are those that were announced first, whichever are complete first, so what a step
trains on does not depend on who was fast. A group is given once. A recipe with a loop of its own
uses this; the trainers of `trainer.v1.trainer_mode` draw by their schedule (`docs/async.md`).
"""

from verl.data_plane import DataPlane, Ready, Receipt

STEP_TAG = "global_steps"
"""The step after which the weights were published that a group was sampled with."""


class ReplayBuffer:
    """Draws from the partitions of `plane`.

    Groups whose tag `global_steps` is more than `max_off_policy_threshold` steps back are left out
    and counted in `num_evicted`; None keeps all, and so does a group without the tag.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        max_off_policy_threshold: int | None = None,
        timeout_seconds: float = 3600.0,
    ) -> None:
        if max_off_policy_threshold is not None and max_off_policy_threshold < 0:
            raise ValueError(
                f"max_off_policy_threshold is {max_off_policy_threshold}; it counts steps, so it "
                "is 0 or more, or None for no limit"
            )
        self.plane = plane
        self.max_off_policy_threshold = max_off_policy_threshold
        self.num_evicted = 0
        self._timeout_seconds = timeout_seconds
        self._given: dict[str, set[str]] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> list[Receipt]:
        """The next `batch_size` groups of a partition; waits until they are complete.

        `plane.get` has their columns. ValueError if fewer are announced; `RowsLost` if a producer
        has ended.
        """
        given = self._given.setdefault(partition_id, set())
        drawn: list[Receipt] = []
        while len(drawn) < batch_size:
            waiting = [key for key in self.plane.entries(partition_id) if key not in given]
            keys = tuple(waiting[: batch_size - len(drawn)])
            if len(keys) < batch_size - len(drawn):
                raise ValueError(
                    f"{batch_size} groups of partition {partition_id!r} are asked for, and "
                    f"{len(drawn) + len(keys)} are announced that no step has had; reserve their "
                    "keys before they are generated, or ask for fewer"
                )
            receipts = self.plane.wait(Ready(keys=keys), self._timeout_seconds)
            given.update(keys)
            fresh = [receipt for receipt in receipts if not self._is_stale(receipt, global_steps)]
            self.num_evicted += len(receipts) - len(fresh)
            drawn += fresh
        return drawn

    def _is_stale(self, receipt: Receipt, global_steps: int) -> bool:
        sampled_at, limit = receipt.tags.get(STEP_TAG), self.max_off_policy_threshold
        if limit is None or not isinstance(sampled_at, int):
            return False
        return global_steps - 1 - sampled_at > limit
