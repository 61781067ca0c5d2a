"""From a training step to its entry in the store.

The trainer hands over the batch of the step as it is; rows are read and decoded on the writer's
thread, with a tokenizer of its own.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.board.store import Sample, Step, StoreWriter
from verl.protocol import DataProto
from verl.protocol.padded import SAMPLED_MASK, SESSION_UID
from verl.protocol.trajectory import Group, InfraError
from verl.utils.media import MEDIA

COLUMNS = {
    "rollout_log_probs": "log_prob",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
    "entropys": "entropy",
    "advantages": "advantage",
    "token_level_scores": "score",
    "token_level_rewards": "reward",
    "values": "value",
    "policy_versions": "version",
    "rollout_is_weights": "is_weight",
}
"""Columns of the batch, and what the page calls them."""

MADE_AGAIN = {
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
    *("rm_scores", "returns", "sum_pi_squared", "positive_weights", "reward_baselines"),
    SAMPLED_MASK,
}
"""Columns that are recorded in another form, or follow from those that are."""

REQUIRED_TENSORS = {
    *("prompts", "responses", "attention_mask", "position_ids", "response_mask"),
    "token_level_scores",
}
REQUIRED_ARRAYS = {"uid"}
"""Columns without which a batch has no samples to record."""

MAX_EXTRA_CHARACTERS = 2000
MAX_FAULTS = 20


class Recorder:
    """Records the steps of one run."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        facts: Mapping[str, Any],
        max_bytes: int,
        first_step: int,
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._validation: list[Sample] = []
        self.writer = StoreWriter(
            folder,
            facts=facts,
            decode=lambda token: self._tokenizer.decode([token]),
            max_bytes=max_bytes,
            first_step=first_step,
        )

    def add_validation(self, samples: Iterable[Sample]) -> None:
        """Keep validation samples for the entry of the step they belong to."""
        self._validation += samples

    def add_step(
        self,
        number: int,
        metrics: Mapping[str, Any],
        seconds: Mapping[str, float],
        *,
        batch: Any = None,
        groups: Sequence[Group] = (),
        warnings: Mapping[str, str] | None = None,
    ) -> None:
        validation, self._validation = self._validation, []
        rows = (
            partial(batch_samples, batch, self._tokenizer)
            if isinstance(batch, DataProto)
            else tuple
        )
        events = [("tripwire", f"{name}: {text}") for name, text in (warnings or {}).items()]
        self.writer.add(
            Step(
                number=number,
                metrics=metrics,
                seconds=seconds,
                batch=batch_facts(batch) if isinstance(batch, DataProto) else {},
                samples=lambda: [*rows(), *validation],
                events=[*events, *fault_events(groups)],
            )
        )

    def close(self) -> None:
        self.writer.close()


def fault_events(groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """What could not be trained on, and why."""
    faults = [f"{group.uid}: {group.fault}" for group in groups if group.fault is not None]
    for trajectory in (t for group in groups for t in group.lost):
        if isinstance(trajectory.grade, InfraError):
            faults.append(f"{trajectory.session_uid}: {trajectory.grade.reason}")
    for text in faults[:MAX_FAULTS]:
        yield "fault", text[:MAX_EXTRA_CHARACTERS]
    if len(faults) > MAX_FAULTS:
        yield "fault", f"and {len(faults) - MAX_FAULTS} more"


def batch_facts(batch: DataProto) -> dict[str, Any]:
    """What `verl.replay` needs of a batch beside its samples.

    `missing` names columns that the store has no place for: such a step cannot be made again.
    """
    tensors, objects = batch.batch, batch.non_tensor_batch
    missing = set(tensors.keys()) - {*COLUMNS, *MADE_AGAIN}
    if MEDIA in objects or tensors["position_ids"].dim() > 2:
        missing.add(MEDIA)
    facts: dict[str, Any] = {
        "missing": sorted(missing),
        "reward_extra_keys": list(batch.meta_info.get("reward_extra_keys", [])),
    }
    if "policy_version" in batch.meta_info:
        facts["policy_version"] = int(batch.meta_info["policy_version"])
    if SESSION_UID in objects:
        facts[SESSION_UID] = [str(uid) for uid in objects[SESSION_UID]]
    if "reward_baselines" in tensors.keys():  # noqa: SIM118 (a TensorDict)
        facts["reward_baselines"] = tensors["reward_baselines"].tolist()
    return facts


def batch_samples(batch: DataProto, tokenizer: Any) -> Iterator[Sample]:
    """The rows of a trained batch."""
    tensors, objects = batch.batch, batch.non_tensor_batch
    num_prompt = tensors["prompts"].shape[1]
    present = tensors["attention_mask"].bool().numpy()
    arrays = {
        short: tensors[name].float().numpy()
        for name, short in COLUMNS.items()
        if name in tensors.keys()  # noqa: SIM118 (a TensorDict)
    }
    sampled = SAMPLED_MASK if SAMPLED_MASK in tensors.keys() else "response_mask"  # noqa: SIM118
    arrays["mask"] = tensors[sampled].float().numpy()
    prompts, responses = tensors["prompts"].numpy(), tensors["responses"].numpy()
    scores = tensors["token_level_scores"].sum(-1).tolist()
    extras = batch.meta_info.get("reward_extra_keys", [])
    texts: dict[bytes, str] = {}  # samples of a prompt share it
    for row in range(len(batch)):
        in_prompt, in_response = present[row, :num_prompt], present[row, num_prompt:]
        prompt = prompts[row][in_prompt]
        prompt_ids, key = prompt.tolist(), prompt.tobytes()
        if key not in texts:
            texts[key] = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        response_ids = responses[row][in_response].tolist()
        yield Sample(
            uid=str(objects["uid"][row]),
            prompt=texts[key],
            response=tokenizer.decode(response_ids, skip_special_tokens=True),
            truth=truth_of(objects, row),
            source=text_of(objects, "data_source", row),
            score=scores[row],
            turns=int(objects["__num_turns__"][row]) if "__num_turns__" in objects else 1,
            extras={name: shown(objects[name][row]) for name in extras if name in objects},
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            columns={name: column[row][in_response] for name, column in arrays.items()},
        )


def truth_of(objects: Mapping[str, np.ndarray], row: int) -> str:
    graded = objects["reward_model"][row] if "reward_model" in objects else None
    truth = graded.get("ground_truth", "") if isinstance(graded, Mapping) else ""
    return str(truth)[:MAX_EXTRA_CHARACTERS]


def text_of(objects: Mapping[str, np.ndarray], name: str, row: int) -> str:
    return str(objects[name][row]) if name in objects else ""


def shown(value: Any) -> Any:
    """What a grader reported, bounded."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    return str(value)[:MAX_EXTRA_CHARACTERS]
