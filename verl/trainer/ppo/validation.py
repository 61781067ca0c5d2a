"""Validation: held-out prompts, sampling settings of their own, the same graders.

A response that could not be graded has no value (None) and is counted as missing; it is not wrong.

The responses of a step may be written to `<folder>/<step>.jsonl`, one line per response: `{"input",
"output", "gts", "score", "step"}` and whatever the reward reported beside the score. A file appears
when it is complete.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.algos.sessions import one_row_per_session
from verl.board.store import Sample
from verl.protocol import DataProto
from verl.protocol.trajectory import Group, InfraError, Score
from verl.trainer.ppo.scoring import graded
from verl.trainer.ppo.validation_metrics import (
    collect_reward_extras,
    name_validation_metrics,
    process_validation_metrics,
)
from verl.utils.torch_functional import kept_tokens
from verl.utils.tracking import jsonable
from verl.workers.reward_manager.service import GradingService

# Controls from U+007F on, line separators, direction marks, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

Extras = dict[str, Any]


@dataclass
class ValidationSamples:
    """Every response of a validation, column by column."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    ground_truths: list[Any] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    extras: list[Extras] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    data_sources: list[str] = field(default_factory=list)
    num_turns: list[int | None] = field(default_factory=list)
    """None for samples that ended with nothing to grade."""

    num_faults: int = 0
    """Samples that ended because their tools or environments are broken."""

    def add(
        self, batch: DataProto, results: list[tuple[float | None, Extras]], tokenizer: Any
    ) -> None:
        """Add a batch and, for each of its responses, the score and what else was reported."""
        arrays = batch.non_tensor_batch
        inputs, outputs = texts_of(batch, tokenizer)
        self.inputs += inputs
        self.outputs += outputs
        self.ground_truths += [entry["ground_truth"] for entry in arrays["reward_model"]]
        self.scores += [score for score, _ in results]
        self.extras += [extras for _, extras in results]
        self.uids += list(arrays["uid"])
        self.data_sources += list(arrays["data_source"])
        self.num_turns += arrays["__num_turns__"].tolist()

    def add_lost(self, groups: Sequence[Group]) -> None:
        """Add the samples that ended with nothing to grade: they are missing, not wrong."""
        for trajectory in (t for group in groups for t in group.lost):
            self.num_faults += isinstance(trajectory.grade, InfraError)
            truth = trajectory.row.get("reward_model") or {}
            self.inputs.append("")
            self.outputs.append("")
            self.ground_truths.append(truth.get("ground_truth"))
            self.scores.append(None)
            self.extras.append({})
            self.uids.append(trajectory.uid)
            self.data_sources.append(trajectory.row["data_source"])
            self.num_turns.append(None)

    def columns(self) -> dict[str, list[Any]]:
        """What graders reported beside the score, None where they did not."""
        return collect_reward_extras(self.extras)

    def dump(self, folder: str, step: int) -> None:
        """Write all samples as JSON lines."""
        dump_generations(
            folder,
            step,
            inputs=self.inputs,
            outputs=self.outputs,
            gts=self.ground_truths,
            scores=self.scores,  # pyright: ignore[reportArgumentType]
            reward_extra_infos=self.columns(),
        )

    def for_board(self) -> list[Sample]:
        """The samples as the run page shows them."""
        return [
            Sample(
                phase="validation",
                uid=self.uids[row],
                prompt=self.inputs[row],
                response=self.outputs[row],
                truth=str(self.ground_truths[row]),
                source=self.data_sources[row],
                score=self.scores[row],
                turns=self.num_turns[row] or 0,
                extras=self.extras[row],
            )
            for row in range(len(self.inputs))
        ]

    def metrics(self) -> dict[str, float]:
        values = {"reward": self.scores, **self.columns()}
        nested = process_validation_metrics(self.data_sources, self.uids, values)
        turns = np.array([turns for turns in self.num_turns if turns is not None])
        return {
            **name_validation_metrics(nested),
            "val-aux/num_turns/min": float(turns.min()),
            "val-aux/num_turns/max": float(turns.max()),
            "val-aux/num_turns/mean": float(turns.mean()),
            "val-aux/env_faults": float(self.num_faults),
        }


def validate(
    batches: Iterable[tuple[DataProto, Sequence[Group]]],
    reward_fn: Callable[..., Any],
    tokenizer: Any,
    grading: GradingService | None = None,
) -> ValidationSamples:
    """Grade batches of responses as they are generated, each with the groups it was made of."""
    samples = ValidationSamples()
    for batch, groups in batches:
        ends = one_row_per_session(batch)
        samples.add(ends, results_of(ends, reward_fn, groups, grading), tokenizer)
        samples.add_lost(groups)
    return samples


def results_of(
    batch: DataProto,
    reward_fn: Callable[..., Any],
    groups: Sequence[Group] = (),
    grading: GradingService | None = None,
) -> list[tuple[float | None, Extras]]:
    """Score and further reports of each response; a score of None where there is no verdict."""
    trajectories, *_ = graded(batch, reward_fn, groups, grading)
    grades = [trajectory.grade for trajectory in trajectories]
    return [(g.value, g.extras) if isinstance(g, Score) else (None, {}) for g in grades]


def texts_of(batch: DataProto, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Prompts and responses as text, without padding and special tokens."""
    num_positions = batch.batch["responses"].shape[1]
    sizes = [batch.batch["prompts"].shape[1], num_positions]
    of_prompt, of_response = batch.batch["attention_mask"].split(sizes, dim=1)
    prompts = kept_tokens(batch.batch["prompts"], of_prompt)
    responses = kept_tokens(batch.batch["responses"], of_response)
    return (
        tokenizer.batch_decode(prompts, skip_special_tokens=True),
        tokenizer.batch_decode(responses, skip_special_tokens=True),
    )


def dump_batch(batch: DataProto, folder: str, step: int, tokenizer: Any) -> None:
    """Write the responses of a training batch with their scores."""
    inputs, outputs = texts_of(batch, tokenizer)
    extras = batch.meta_info.get("reward_extra_keys", [])
    columns = {name: list(batch.non_tensor_batch[name]) for name in extras}
    if "data_source" in batch.non_tensor_batch:  # which grader it was
        columns = {"data_source": list(batch.non_tensor_batch["data_source"]), **columns}
    dump_generations(
        folder,
        step,
        inputs=inputs,
        outputs=outputs,
        gts=[entry["ground_truth"] for entry in batch.non_tensor_batch["reward_model"]],
        scores=batch.batch["token_level_scores"].sum(-1).tolist(),
        reward_extra_infos=columns,
    )


def dump_generations(
    folder: str | Path,
    step: int,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    reward_extra_infos: Mapping[str, Sequence[Any]],
) -> Path:
    """Write one step and return the path. Every column has one entry per response."""
    columns = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
    columns |= {key: values for key, values in reward_extra_infos.items() if key not in columns}
    for name, values in columns.items():
        if len(values) != len(inputs):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(inputs)} responses; a response "
                "without a value needs None in its place"
            )
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for row in range(len(inputs)):
            entry = {name: jsonable(values[row]) for name, values in columns.items()}
            file.write(readable_json({**entry, "step": step}) + "\n")
    os.replace(unfinished, path)
    return path


def readable_json(entry: Mapping[str, Any]) -> str:
    """All scripts as they are written; what could steer a terminal or break a line is escaped."""
    text = json.dumps(entry, ensure_ascii=False)  # escapes the controls below U+0020 by itself
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
