"""Make a recorded step again: `python -m verl.replay RUN --step N [--algorithm NAME] [key=value]`

RUN is the folder of a run that was recorded (`trainer.board=True`). Weights come from the newest
checkpoint before the step, or from where the run began; recorded steps in between are trained
again. Log-probs, advantages and the gradient of the step are computed anew from the recorded tokens
and scores and compared with what the run recorded, bit for bit. Nothing is generated, graded or
written.

With `--algorithm` (an advantage estimator or a policy loss) or with options the step is made twice:
a table shows what they would have done with this batch, from the same weights.

Exit codes: 0 as recorded, 1 something differs, 2 a mistake in the arguments or the folder.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from yaml import MarkedYAMLError

from verl.algos.registry import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.board.compare import MACHINE_METRICS
from verl.board.reader import NoStore, StoreReader, one_run
from verl.board.recorder import COLUMNS
from verl.board.store import Sample
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.roles import async_mode, needs_critic
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID, Padding, padded_columns
from verl.protocol.trajectory import Segment, Trajectory, response_segments
from verl.single_controller.base.failures import WorkerError
from verl.trainer.main_replay import DIFFERENT, MISTAKE, QUIET, SAME
from verl.trainer.ppo.context import StepContext, object_array
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.task_runner import TaskRunner
from verl.utils.checkpoint.layout import CheckpointError, list_steps

SECTIONS = ("actor", "rollout", "ref", "model")
"""Of `actor_rollout_ref`, which may be left out of an option."""

COMPARED = ("old_log_prob", "ref_log_prob", "value", "reward", "advantage")
SHOWN = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm")


@dataclass(kw_only=True)
class Remade:
    """A step that was made again."""

    batch: DataProto
    metrics: Mapping[str, Any]
    gradient: list[Tensor] | None = None
    """Of the first optimizer step, clipped; None where other processes hold it."""

    change: list[Tensor] | None = None
    """What the step added to the weights."""


@dataclass(kw_only=True)
class Request:
    """What is to be made again, and from where."""

    store: StoreReader
    step: int
    checkpoint: Path | None
    """None starts from the first weights."""

    overrides: list[str] = field(default_factory=list)


class StoredTrainer(PPOTrainer):
    """Trains on the batches of a store up to the step that is asked for."""

    request: Request
    remade: Remade | None = None

    def fit(self) -> None:
        with self.session():
            self._load_checkpoint()
            for step in self.steps():
                if step.step == self.request.step:
                    if self.global_steps - 1 != self.last_saved_step:
                        self.global_steps -= 1
                        self._save_checkpoint()
                        self.global_steps += 1
                    self.remade = self._observed(step)
                    return
                self.train_step(step)

    def rollout(self, step: StepContext) -> DataProto:
        return stored_batch(self.request.store, step.step, self.padding)

    def _observed(self, step: StepContext) -> Remade:
        """Make the step, and look at gradient and weights where they are in this process."""
        group = self.actor_rollout_wg
        if group.world_size > 1:
            return Remade(batch=self.train_step(step), metrics=step.report.metrics)
        optimizer = group.workers[0].engine.require_optimizer()
        gradient: list[Tensor] = []

        def keep(_: Any, args: Any, kwargs: Any) -> None:
            if not gradient:
                gradient.extend(m.grad.detach().clone() for m in optimizer.masters.values())

        before = [master.detach().clone() for master in optimizer.masters.values()]
        handle = optimizer.optimizer.register_step_pre_hook(keep)
        try:
            batch = self.train_step(step)
        finally:
            handle.remove()
        change = [m.detach() - b for m, b in zip(optimizer.masters.values(), before, strict=True)]
        return Remade(batch=batch, metrics=step.report.metrics, gradient=gradient, change=change)


# ---- the batch -----------------------------------------------------------------------------------


def stored_batch(store: StoreReader, step: int, padding: Padding) -> DataProto:
    """The batch of a step after `score`, as its stages found it."""
    facts, samples = store.recorded_batch(step)
    if not samples:
        raise ValueError(
            f"{store.path} has no samples of step {step}; either it was left out of training, or "
            "the file had reached its limit (trainer.board_megabytes)"
        )
    if facts["missing"]:
        raise ValueError(
            f"step {step} trained on columns that the store does not hold: "
            f"{', '.join(facts['missing'])}; python -m verl.trainer.main_replay generates the "
            "trajectories of a run with checkpoints again"
        )
    tensors = padded_columns([as_trajectory(sample) for sample in samples], padding)
    tensors["token_level_scores"] = column(samples, "score", padding.response_length)
    for name in ("rollout_log_probs", "policy_versions"):
        if name in COLUMNS and COLUMNS[name] in samples[0].columns:
            tensors[name] = column(samples, COLUMNS[name], padding.response_length)
    if "reward_baselines" in facts:
        tensors["reward_baselines"] = torch.tensor(facts["reward_baselines"])
    objects: dict[str, Any] = {
        "uid": [sample.uid for sample in samples],
        "data_source": [sample.source for sample in samples],
        "reward_model": object_array({"ground_truth": sample.truth} for sample in samples),
        "__num_turns__": np.array([sample.turns for sample in samples], dtype=np.int32),
    }
    names = facts["reward_extra_keys"]
    objects |= {name: [sample.extras.get(name) for sample in samples] for name in names}
    if SESSION_UID in facts:
        objects[SESSION_UID] = facts[SESSION_UID]
    meta: dict[str, Any] = {"reward_extra_keys": names}
    if "policy_version" in facts:
        meta["policy_version"] = facts["policy_version"]
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info=meta)


def as_trajectory(sample: Sample) -> Trajectory:
    mask = sample.columns["mask"].astype(int).tolist()
    prompt = Segment(author="template", token_ids=list(sample.prompt_ids))
    response = response_segments(list(sample.response_ids), mask, None)
    return Trajectory(uid=sample.uid, sample=0, row={}, segments=[prompt, *response])


def column(samples: Sequence[Sample], name: str, width: int) -> Tensor:
    """(B, T), 0 behind the end of a response."""
    values = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        found = sample.columns[name]
        values[row, : len(found)] = torch.from_numpy(found.copy())
    return values


# ---- a run up to the step ------------------------------------------------------------------------


def request_of(folder: Path, step: int, overrides: Sequence[str] = ()) -> Request:
    store = one_run(folder)
    loop = store.facts.get("foreign_loop")
    if loop:
        raise ValueError(
            f"the steps of {store.path} were made by {loop}, not by our fit; only those of ours "
            "are made again from a store"
        )
    recorded = [entry["step"] for entry in store.steps() if entry["step"] > 0]
    if step not in recorded:
        ends = f"it has {recorded[0]} to {recorded[-1]}" if recorded else "it has none"
        raise ValueError(f"{store.path} has no step {step}; {ends}")
    saved = {n: path for n, path in list_steps(store.path.parent).items() if n < step}
    first = max(saved, default=0)
    needed = sorted(set(range(first + 1, step)) - set(recorded))
    if needed:
        raise ValueError(
            f"step {step} needs the weights before it: a checkpoint of step {step - 1}, or an "
            f"older one and every recorded step since. {store.path.parent} has "
            f"{f'the checkpoint of step {first}' if saved else 'no checkpoint'}, and step "
            f"{needed[0]} is not recorded"
        )
    return Request(store=store, step=step, checkpoint=saved.get(first), overrides=list(overrides))


def remake(request: Request, folder: Path) -> tuple[Remade, Path | None]:
    """Make the step; also the checkpoint of the moment before it, None if that is the start."""

    class Runner(TaskRunner):
        trainer_class = type("Replay", (StoredTrainer,), {"request": request})

    runner = Runner()
    runner.run(replay_config(request, folder))
    assert isinstance(runner.trainer, StoredTrainer)
    assert runner.trainer.remade is not None
    start = folder / f"global_step_{request.step - 1}"  # made where the run has none
    return runner.trainer.remade, start if start.exists() else request.checkpoint


def replay_config(request: Request, folder: Path) -> PPOConfig:
    """The run's own configuration with the overrides; it writes into `folder` alone."""
    values = DictConfig(request.store.facts["settings"])
    values.critic.pop(
        "model_config", None
    )  # set by the run, and as an option an older name of model
    recorded = load_config(values, PPOConfig).faults  # keys that the run added with +
    values.merge_with_dotlist(request.overrides)
    faults = load_config(values, PPOConfig).faults
    if mistakes := [fault for fault in faults if fault not in recorded]:
        raise ConfigError(mistakes)
    quiet: dict[str, Any] = {**QUIET, "default_local_dir": str(folder), "resume_mode": "disable"}
    if request.checkpoint is not None:
        quiet |= {"resume_mode": "resume_path", "resume_from_path": str(request.checkpoint)}
    if request.overrides:
        quiet["resume_may_change"] = ["*"]
    values.merge_with({"trainer": quiet, "data": {"val_files": []}})
    values.actor_rollout_ref.rollout.merge_with(
        {"prometheus": {"enable": False}, "trace": {"backend": None}}
    )
    config = load_config(values, PPOConfig, keeps_unknown=True).checked()
    require_plain_steps(config)
    return config


def require_plain_steps(config: PPOConfig) -> None:
    for key, value in (("mode", async_mode(config)), ("trainer.recipe", config.trainer.recipe)):
        if value not in (None, "sync"):
            raise ValueError(
                f"the run was made with {key}={value}, whose steps are not those of PPOTrainer; "
                "only those are made again from a store"
            )


def overrides_of(algorithm: str | None, options: Sequence[str]) -> list[str]:
    """What the arguments change; `--algorithm` is an estimator or a policy loss."""
    overrides: list[str] = []
    if algorithm is not None:
        if algorithm in ADV_ESTIMATOR_REGISTRY:
            overrides.append(f"algorithm.adv_estimator={algorithm}")
        elif algorithm in POLICY_LOSS_REGISTRY:
            overrides.append(f"actor_rollout_ref.actor.policy_loss.loss_mode={algorithm}")
        else:
            raise ValueError(
                f"--algorithm is {algorithm!r}; it must be an advantage estimator "
                f"({', '.join(sorted(ADV_ESTIMATOR_REGISTRY))}) or a policy loss "
                f"({', '.join(sorted(POLICY_LOSS_REGISTRY))})"
            )
    for option in options:
        if "=" not in option:
            raise ValueError(f"{option!r} is no option; write key=value")
        is_short = option.partition(".")[0] in SECTIONS
        overrides.append(f"actor_rollout_ref.{option}" if is_short else option)
    return overrides


# ---- what is shown -------------------------------------------------------------------------------


def differences(request: Request, remade: Remade) -> list[str]:
    """Where the step is not what was recorded; empty if it is, bit for bit."""
    _, samples = request.store.recorded_batch(request.step)
    tensors = remade.batch.batch
    found: list[str] = []
    for name, short in COLUMNS.items():
        if short not in COMPARED or short not in samples[0].columns:
            continue
        expected = column(samples, short, tensors["responses"].shape[1])
        mask = tensors["response_mask"].bool()
        differs = ((tensors[name].float() != expected) & mask).nonzero()
        if len(differs):
            row, at = differs[0].tolist()
            found.append(
                f"{name} of {len(differs)} tokens, first of token {at} of sample {row}: "
                f"{float(tensors[name][row, at])!r}, recorded {float(expected[row, at])!r}"
            )
    (entry,) = (e for e in request.store.steps(request.step - 1) if e["step"] == request.step)
    for name, value in sorted(remade.metrics.items()):
        recorded = entry["metrics"].get(name)
        if name.startswith((*MACHINE_METRICS, "mfu/")) or recorded is None:
            continue
        if float(value) != float(recorded):
            found.append(f"{name}: {float(value)!r}, recorded {recorded!r}")
    return found


def what_if(real: Remade, other: Remade) -> Table:
    """What the step did, and what the other settings would have done."""
    table = Table("", "as it was", "instead")
    masks = [one.batch.batch["response_mask"].bool() for one in (real, other)]
    values = [
        one.batch.batch["advantages"][mask] for one, mask in zip((real, other), masks, strict=True)
    ]
    rows = [("advantage, mean", *(v.mean().item() for v in values))]
    rows.append(("advantage, mean size", *(v.abs().mean().item() for v in values)))
    rows.append(("advantage, largest size", *(v.abs().max().item() for v in values)))
    turned = (values[0].sign() != values[1].sign()).float().mean().item()
    rows += [
        (name, float(real.metrics[name]), float(other.metrics[name]))
        for name in SHOWN
        if name in real.metrics and name in other.metrics
    ]
    for name, a, b in rows:
        table.add_row(name, f"{a:.6g}", f"{b:.6g}")
    table.add_row("tokens whose advantage has another sign", "", f"{turned:.1%}")
    for name, a, b in (
        ("gradient of the first optimizer step", real.gradient, other.gradient),
        ("change of the weights", real.change, other.change),
    ):
        shown = "not in this process: set trainer.n_gpus_per_node=1"
        if a is not None and b is not None:
            shown = f"{cosine(a, b):.6f}"
        table.add_row(f"cosine, {name}", "1", shown)
    return table


def cosine(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of the angle between two gradients, over all parameters; 0 if one of them is 0."""

    def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        pairs = zip(a, b, strict=True)
        return sum(torch.dot(x.flatten().double(), y.flatten().double()).item() for x, y in pairs)

    size = (product(ours, ours) * product(theirs, theirs)) ** 0.5
    return product(ours, theirs) / size if size else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_intermixed_args(arguments)
    try:
        overrides = overrides_of(options.algorithm, options.options)
        request = request_of(Path(options.run).expanduser(), options.step)
        changed = replace(request, overrides=overrides)
        with tempfile.TemporaryDirectory() as folder:
            # A mistake is refused before anything is made.
            wanted = replay_config(changed, Path(folder))
            if needs_critic(wanted) and not needs_critic(replay_config(request, Path(folder))):
                raise ValueError(
                    "these options need a critic, and the run trained none; choose an advantage "
                    "estimator that works without"
                )
            real, start = remake(request, Path(folder) / "real")
            found = differences(request, real)
            if overrides:
                changed = replace(changed, checkpoint=start)
                other, _ = remake(changed, Path(folder) / "other")
                Console().print(what_if(real, other))
    except MarkedYAMLError as error:
        sys.stderr.write(f"error: the value of an option is no YAML: {error.problem}\n")
        return MISTAKE
    except WorkerError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        sys.stderr.write(f"error: {error.__cause__}\n")  # what a loss needs and the options lack
        return MISTAKE
    except (ValueError, OSError, CheckpointError, NoStore) as error:
        sys.stderr.write(f"error: {error}\n")
        return MISTAKE
    norm = real.metrics.get("actor/grad_norm")
    sys.stdout.write(f"step {request.step}: {len(real.batch)} samples, gradient norm {norm}\n")
    if not found:
        sys.stdout.write("log-probs, advantages and gradient are as recorded, bit for bit\n")
        return SAME
    sys.stdout.write("".join(f"differs: {line}\n" for line in found))
    return DIFFERENT


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="python -m verl.replay", description=(__doc__ or "").partition("\n")[0]
    )
    root.add_argument("run", help="folder of a run with board.sqlite (trainer.board=True)")
    root.add_argument("--step", type=int, required=True, help="the step to make again")
    root.add_argument("--algorithm", help="an estimator or a policy loss to compare with")
    root.add_argument("options", nargs="*", help="key=value, e.g. actor.clip_ratio=0.1")
    return root


if __name__ == "__main__":
    sys.exit(main())
