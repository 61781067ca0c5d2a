"""Training on finished groups while the rest of the batch is still generated.

    event loop of the engines                          scoring threads
      decode, decode, ...
      a group's last response ends  ---------------->    reward manager grades the group
      decode, decode, ...           <----------------    grades
      advantages of the group; passes that are full are started; decode goes on beside them
      ...
      the last group is in: the stages of the step go on, and `update` only makes the step

The stages after `rollout` see the whole batch as ever, with the scores found here, so nothing is
graded twice; `update` compares their advantages with those that were trained on. What may be
overlapped is settled by the configuration (`verl.config.validate_overlap`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.follower import AsBatch, EndedRow, Follower, batch_of
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import Scored, graded, score_batch, settle_groups, settled
from verl.workers.reward_manager.abstract import precomputed_rewards
from verl.workers.reward_manager.grader import Grade
from verl.workers.reward_manager.grading import PerResponseManager

ADVANTAGE_TOLERANCE = 1e-5
"""Sums over a group may be rounded differently beside other groups."""


class OverlappedUpdate(Follower):
    """The update of one step. `assign_credit` adds advantages to a scored group."""

    def __init__(
        self,
        worker_group: Any,
        reward_fn: Any,
        assign_credit: Callable[[DataProto], DataProto],
        *,
        num_prompts: int,
        samples_per_prompt: int,
    ) -> None:
        if not isinstance(reward_fn, PerResponseManager):
            raise ValueError(
                f"the reward manager {type(reward_fn).__name__} judges whole batches, but with "
                "actor_rollout_ref.actor.update_while_generating=True groups are judged one by "
                "one: use naive, dapo or another manager that judges each response, or set the "
                "key to False"
            )
        self.seconds = 0.0
        """What passes have cost the event loop."""

        self.num_rows_before_end = 0
        """Rows whose passes had been started when the last response ended."""

        self._workers, self._reward_fn = worker_group, reward_fn
        self._assign_credit = assign_credit
        self._samples_per_prompt = samples_per_prompt
        self._groups: dict[str, list[EndedRow]] = defaultdict(list)
        self._tasks: list[asyncio.Task[None]] = []
        self._grades: dict[int, Grade] = {}
        self._num_faults = 0
        self._trained: dict[int, torch.Tensor] = {}  # advantages by place
        self._num_rows_run = 0
        self._as_batch: AsBatch | None = None
        worker_group.begin_update(num_prompts * samples_per_prompt)

    def follow(self, as_batch: AsBatch) -> Follower:
        """What the agent loops are to tell."""
        self._as_batch = as_batch
        return self

    async def add(self, place: int, row: Mapping[str, Any], output: AgentLoopOutput) -> None:
        group = self._groups[row["uid"]]
        group.append(EndedRow(place, row, output))
        if len(group) == self._samples_per_prompt:
            before = self._tasks[-1] if self._tasks else None
            work = self._train_on(self._groups.pop(row["uid"]), before)
            self._tasks.append(asyncio.create_task(work))

    async def finish(self, batch: DataProto) -> None:
        """Wait until the last group is in. Its passes are made then, or by the optimizer step."""
        assert not self._groups, "every prompt has as many rows as it has samples"
        self.num_rows_before_end = self._num_rows_run
        await asyncio.gather(*self._tasks)
        batch.meta_info["timing"]["overlapped_update"] = self.seconds

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def scored(self, batch: DataProto) -> Scored | None:
        """The batch with the scores that groups got; None where its loops have scored it."""
        if precomputed_rewards(batch) is not None:
            return None
        grades = [self._grades[place] for place in range(len(batch))]
        return settled(batch, grades, self._num_faults)

    def finish_update(self, batch: DataProto) -> DataProto:
        """Make the optimizer step, if the stages have come to the same advantages."""
        trained = torch.stack([self._trained[place] for place in sorted(self._trained)])
        found = batch.batch["advantages"]
        is_same = trained.shape == found.shape and torch.allclose(
            trained, found, rtol=ADVANTAGE_TOLERANCE, atol=ADVANTAGE_TOLERANCE
        )
        if not is_same:
            raise ValueError(
                f"groups were trained on {len(trained)} rows of advantages while others were "
                f"generated, and now the batch has other ones ({len(found)} rows): a stage of the "
                "trainer looks at more than a group. Set "
                "actor_rollout_ref.actor.update_while_generating=False"
            )
        return self._workers.finish_update()

    async def _train_on(self, rows: list[EndedRow], before: asyncio.Task[None] | None) -> None:
        """Score a group, and take it in when its turn has come.

        Groups are taken in the order in which they ended, not in which they were scored: so the
        same rows share a micro-batch in every run, and the gradient has the same bits.
        """
        rows.sort(key=lambda row: row.place)
        assert self._as_batch is not None
        group = batch_of(rows, self._as_batch)
        if "rollout_log_probs" not in group.batch.keys():  # noqa: SIM118 (a TensorDict)
            raise ValueError(
                "an agent loop gave no response_logprobs; with actor_rollout_ref.actor."
                "update_while_generating=True there is no other pass to know them from: pass on "
                "the log_probs of what `generate` returns"
            )
        group.batch["place"] = torch.tensor([row.place for row in rows])
        scored = await self._scored_group(group)
        if before is not None:
            await before
        if scored is None:
            return
        start = time.perf_counter()
        scored = self._assign_credit(scored)
        scored.batch["old_log_probs"] = scored.batch["rollout_log_probs"]
        places = scored.batch.pop("place").tolist()
        self._trained.update(zip(places, scored.batch["advantages"], strict=True))
        self._num_rows_run = self._workers.add_to_update(scored)
        self.seconds += time.perf_counter() - start

    async def _scored_group(self, group: DataProto) -> DataProto | None:
        """The rows that stay, with their scores; None for a group that is set aside."""
        if precomputed_rewards(group) is not None:
            return score_batch(group, self._reward_fn).batch
        grades, num_faults = await asyncio.to_thread(graded, group, self._reward_fn)
        self._grades.update(zip(group.batch["place"].tolist(), grades, strict=True))
        self._num_faults += num_faults
        keep, _ = settle_groups(group.non_tensor_batch["uid"], grades)
        return settled(group, grades, num_faults).batch if any(keep) else None
