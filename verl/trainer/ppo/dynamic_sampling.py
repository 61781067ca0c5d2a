"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): train where there is something to learn.

A prompt whose responses all score alike has no advantage to learn from. Such prompts are dropped,
and further ones are generated until the batch is full. Scores are compared exactly: rounding makes
no difference where there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.config.algorithm import FilterGroupsConfig
from verl.protocol import DataProto

SEQUENCE_SCORES = ("score", "seq_reward", "seq_final_reward")


@dataclass(frozen=True)
class Filled:
    """A full batch and how many generation batches it took."""

    batch: DataProto
    num_gen_batches: int
    num_dropped_groups: int


def fill_batch(
    first: DataProto,
    *,
    config: FilterGroupsConfig,
    num_prompts: int,
    score: Callable[[DataProto], DataProto],
    generate_more: Callable[[], DataProto],
) -> Filled:
    """Score, drop and generate until `num_prompts` prompts are left; surplus ones are cut off."""
    assert config.metric is not None  # refused by validation
    parts: list[DataProto] = []
    num_kept = num_dropped = num_batches = 0
    batch = first
    while True:
        num_batches += 1
        scored = score(batch)
        chosen = informative_rows(scored, config.metric)
        groups = dict.fromkeys(scored.non_tensor_batch["uid"][chosen])
        num_dropped += len(dict.fromkeys(scored.non_tensor_batch["uid"])) - len(groups)
        if len(groups):
            parts.append(scored.select_idxs(chosen))
            num_kept += len(groups)
        if num_kept >= num_prompts:
            break
        if 0 < config.max_num_gen_batches <= num_batches:
            raise ValueError(
                f"{num_batches} generation batches gave {num_kept} of {num_prompts} prompts whose "
                f"responses differ in {config.metric!r}; the task may be too easy or too hard for "
                "the policy. Raise algorithm.filter_groups.max_num_gen_batches (0 has no limit) or "
                "data.gen_batch_size, or look at the data"
            )
        batch = generate_more()
    return Filled(first_groups(join(parts), num_prompts), num_batches, num_dropped)


def informative_rows(batch: DataProto, metric: str) -> list[int]:
    """Rows of prompts whose responses differ in `metric`; a single response always counts."""
    values = metric_values(batch, metric)
    rows_of: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows_of.setdefault(uid, []).append(row)
    return [
        row
        for rows in rows_of.values()
        if len(rows) == 1 or len({values[row] for row in rows}) > 1
        for row in rows
    ]


def metric_values(batch: DataProto, metric: str) -> list[Any]:
    """The value of each response: its score, or something that the reward function reported."""
    reported = batch.meta_info.get("reward_extra_keys", [])
    if metric in reported:
        return list(batch.non_tensor_batch[metric])
    if metric in SEQUENCE_SCORES:
        return batch.batch["token_level_scores"].sum(-1).tolist()
    known = ", ".join([*SEQUENCE_SCORES, *reported])
    raise ValueError(
        f"algorithm.filter_groups.metric is {metric!r}, but responses only have: {known}"
    )


def first_groups(batch: DataProto, num_prompts: int) -> DataProto:
    """The rows of the first `num_prompts` prompts."""
    uids = batch.non_tensor_batch["uid"]
    wanted = set(list(dict.fromkeys(uids))[:num_prompts])
    return batch.select_idxs(np.array([uid in wanted for uid in uids]))


def join(parts: list[DataProto]) -> DataProto:
    """Below each other; what belongs to single generations (timing) is left behind."""
    names = dict.fromkeys(name for part in parts for name in part.meta_info["reward_extra_keys"])
    for part in parts:
        for name in names.keys() - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), None, dtype=object)
        part.meta_info = {"reward_extra_keys": list(names)}
    return DataProto.concat(parts)
