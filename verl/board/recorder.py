"""From a training step to its entry in the store.

The trainer packs the tokens of a batch, column by column, and hands them to the process that writes
(`verl.board.process`): rows, texts and the database are that process's work.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from verl.board.process import StoreProcess
from verl.board.store import FILE_NAME, Sample, plain_numbers
from verl.board.writer import COLUMN, split
from verl.protocol import DataProto
from verl.protocol.padded import SAMPLED_MASK, SESSION_UID
from verl.protocol.trajectory import Group, InfraError
from verl.utils.media import MEDIA
from verl.utils.tokenizer import backend_json

logger = logging.getLogger(__name__)

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
        self.path = folder / FILE_NAME
        self._validation: list[Sample] = []
        description = backend_json(tokenizer)
        self._texts = TrainerTexts(tokenizer) if description is None else None
        setup = {
            "folder": str(folder.resolve()),
            "facts": facts,
            "first_step": first_step,
            "max_bytes": max_bytes,
            "tokenizer": description,
        }
        self.process = StoreProcess(self.path, setup)

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
        if not self.process.is_recording:
            return
        events = [("tripwire", f"{name}: {text}") for name, text in (warnings or {}).items()]
        events += fault_events(groups)
        content: dict[str, Any] = {
            "number": number,
            "time": time.time(),
            "metrics": plain_numbers(metrics),
            "seconds": plain_numbers(seconds),
            "batch": batch_facts(batch) if isinstance(batch, DataProto) else {},
            "rows": None,
            "validation": [],
            "events": events,
        }
        arrays: dict[str, np.ndarray] = {}
        if self.process.is_behind:
            text = "the disk is slower than training: samples of this step are left out"
            events.append(("left out", text))
        else:
            content["validation"] = list(map(validation_row, validation))
            if isinstance(batch, DataProto):
                content["rows"], arrays = batch_rows(batch), batch_arrays(batch)
                if self._texts is not None:
                    self._texts.add_to(content, arrays)
        self.process.add(number, content, arrays)

    def close(self) -> None:
        self.process.close()


class TrainerTexts:
    """Texts of a tokenizer whose way of decoding no other process knows: the trainer decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known_ids = np.empty(0, dtype=np.int32)
        logger.warning(
            "%s decodes in a way of its own: the record of the run (trainer.board) is decoded by "
            "the trainer, which takes time of each step",
            type(tokenizer).__name__,
        )

    def add_to(self, content: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        for name in ("prompt", "response"):
            rows = split(arrays[f"{name}_ids"], arrays[f"{name}_lengths"])
            content["rows"][name] = [
                self._tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows
            ]
        ids = np.concatenate([arrays["prompt_ids"], arrays["response_ids"]])
        new = np.setdiff1d(ids, self._known_ids)
        content["vocabulary"] = [(token, self._tokenizer.decode([token])) for token in new.tolist()]
        self._known_ids = np.union1d(self._known_ids, new)


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


def batch_rows(batch: DataProto) -> dict[str, Any]:
    """What each sample of a trained batch has beside its tokens, one list per field."""
    objects, extras = batch.non_tensor_batch, batch.meta_info.get("reward_extra_keys", [])
    graded = objects.get("reward_model", [None] * len(batch))
    return {
        "uid": list(map(str, objects["uid"])),
        "truth": list(map(truth_of, graded)),
        "source": list(map(str, objects.get("data_source", [""] * len(batch)))),
        "score": batch.batch["token_level_scores"].sum(-1).tolist(),
        "turns": list(map(int, objects.get("__num_turns__", [1] * len(batch)))),
        "extras": {name: [shown(v) for v in objects[name]] for name in extras if name in objects},
    }


def batch_arrays(batch: DataProto) -> dict[str, np.ndarray]:
    """The tokens of all samples, one behind the other, and how many are of which."""
    tensors = batch.batch
    num_prompt = tensors["prompts"].shape[1]
    present = tensors["attention_mask"].bool()
    in_prompt, in_response = present[:, :num_prompt], present[:, num_prompt:]
    places = places_of(in_response)
    sampled = SAMPLED_MASK if SAMPLED_MASK in tensors.keys() else "response_mask"  # noqa: SIM118
    names = {sampled: "mask"}
    names |= {name: short for name, short in COLUMNS.items() if name in tensors.keys()}  # noqa: SIM118
    return {
        "prompt_lengths": in_prompt.sum(-1).numpy(),
        "response_lengths": in_response.sum(-1).numpy(),
        "prompt_ids": packed(tensors["prompts"], places_of(in_prompt)).int().numpy(),
        "response_ids": packed(tensors["responses"], places).int().numpy(),
        **{
            f"{COLUMN}{short}": packed(tensors[name], places).float().numpy()
            for name, short in names.items()
        },
    }


def places_of(mask: Tensor) -> Tensor:
    return mask.reshape(-1).nonzero().squeeze(-1)


def packed(values: Tensor, places: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, places)


def validation_row(sample: Sample) -> dict[str, Any]:
    """A sample without tokens, as JSON has it."""
    return {
        "phase": sample.phase,
        "uid": str(sample.uid),
        "prompt": sample.prompt,
        "response": sample.response,
        "truth": str(sample.truth),
        "source": str(sample.source),
        "score": None if sample.score is None else float(sample.score),
        "turns": int(sample.turns),
        "extras": {str(name): shown(value) for name, value in sample.extras.items()},
    }


def truth_of(graded: Any) -> str:
    truth = graded.get("ground_truth", "") if isinstance(graded, Mapping) else ""
    return str(truth)[:MAX_EXTRA_CHARACTERS]


def shown(value: Any) -> Any:
    """What a grader reported, bounded, as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float) or value is None:
        return value
    return str(value)[:MAX_EXTRA_CHARACTERS]
