"""An update as the package makes it, on one rank or as one of several, beside the expected one.

Its optimizer changes no weight and keeps the gradient it was given, whole or this rank's part of
it, so one engine makes many updates from the same start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tests.parity import models, reference
from tests.parity.combinations import Combination, Setup
from tests.parity.reference import Expected
from tests.parity.rows import LONGEST_ROW, batch
from verl.algos.components import component_tokens
from verl.config.actor import FSDPActorConfig
from verl.config.critic import FSDPCriticConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.utils.checkpoint.pieces import local_tensor
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.inputs import prompt_groups
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine
from verl.workers.schedule import MicroBatching, UpdatePlan, plan_update

TOKENS_PER_DEVICE = LONGEST_ROW + 3
CUTS = {
    "rows": {"ppo_micro_batch_size_per_gpu": 2},
    "tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": TOKENS_PER_DEVICE},
}
SMALL_METRIC = 1.0
"""Metrics are means of numbers of this size; those below it are compared by difference."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The largest difference, relative to the largest element of a gradient, or to a metric.

    What is not a number deviates infinitely.
    """

    gradient: float
    metrics: float
    where: str


class KeepsGradients(torch.optim.Optimizer):
    """A step that moves nothing and remembers what it was asked to do."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["gradient"] = parameter.grad.clone()


def make_updates(
    cases: Sequence[Combination],
    expectations: Sequence[Expected],
    folder: Path,
    rank: int = 0,
) -> list[Deviation]:
    """All of `cases` have the same number of ranks; neighbours with one setup share an engine."""
    num_ranks = cases[0].setup.num_ranks
    pairs = [dist.new_group([r, r + 1]) for r in range(0, num_ranks - 1, 2)]
    found, built_for, engine = [], None, None
    for case, expectation in zip(cases, expectations, strict=True):
        if case.setup != built_for:
            is_divided = case.setup.ranks_per_sequence == 2
            engine = build_engine(case.setup, folder, pairs[rank // 2] if is_divided else None)
            built_for = case.setup
        assert engine is not None
        found.append(deviation(engine, case, expectation))
    return found


def build_engine(
    setup: Setup, folder: Path, sequence_group: dist.ProcessGroup | None
) -> OneDeviceEngine:
    options: dict[str, Any] = {
        "max_grad_norm": 1e9,
        "is_value_model": setup.role == "critic",
        "prefix_sharing": setup.prefix_sharing,
    }
    model = (folder, setup.architecture, setup.role, setup.adapters)
    load = partial(models.load, *model)
    optimizer = FSDPOptimizerConfig(
        lr=reference.LEARNING_RATE, optimizer="KeepsGradients", optimizer_impl=__name__
    )
    if setup.sharding == "none":
        engine = OneDeviceEngine(load, optimizer, **options)
    elif setup.sharding == "zero1":
        engine = Zero1Engine(load, optimizer, sequence_group=sequence_group, **options)
    else:
        engine = FSDPEngine(
            load,
            optimizer,
            build_skeleton=partial(models.skeleton, *model),
            config=FSDPEngineConfig(
                expert_parallel_size=setup.num_ranks if setup.sharding == "experts" else 1
            ),
            compute_dtype=torch.float32,
            device="cpu",
            sequence_group=sequence_group,
            **options,
        )
    engine.initialize()
    return engine


def deviation(engine: OneDeviceEngine, case: Combination, expectation: Expected) -> Deviation:
    metrics = updated(engine, case, batch(case.rows))
    metrics = {name: value for name, value in metrics.items() if "expert" not in name}
    gradients = whole_gradients(engine, expectation.gradients)
    assert metrics.keys() == expectation.metrics.keys()
    assert gradients.keys() == expectation.gradients.keys()
    of_gradients = {
        name: as_number((gradients[name] - value).abs().max() / value.abs().max())
        for name, value in expectation.gradients.items()
    }
    of_metrics = {
        name: as_number(abs(metrics[name] - value) / max(abs(value), SMALL_METRIC))
        for name, value in expectation.metrics.items()
    }
    worst = [max(found, key=lambda name: found[name]) for found in (of_gradients, of_metrics)]
    return Deviation(
        gradient=of_gradients[worst[0]], metrics=of_metrics[worst[1]], where=" and ".join(worst)
    )


def as_number(value: Tensor | float) -> float:
    return math.inf if math.isnan(value) else float(value)


def largest(found: Sequence[Deviation]) -> Deviation:
    return Deviation(
        gradient=max(deviation.gradient for deviation in found),
        metrics=max(deviation.metrics for deviation in found),
        where=", ".join(sorted({deviation.where for deviation in found})),
    )


def updated(engine: OneDeviceEngine, case: Combination, rows: TensorDict) -> dict[str, Any]:
    """The metrics of one optimizer step on the rows that are this rank's."""
    plan = plan_of(case, rows, engine)
    own = rows[plan.rows_of(engine.get_data_parallel_rank())]
    common: dict[str, Any] = {"loss_agg_mode": case.aggregation, **CUTS[case.cut]}
    if case.setup.role == "critic":
        config = FSDPCriticConfig(cliprange_value=reference.VALUE_CLIP, **common)
        return DataParallelPPOCritic(config, engine).update_critic(
            own, rows_per_step=len(rows), plan=plan
        )
    config = FSDPActorConfig(
        clip_ratio=reference.CLIP,
        clip_ratio_c=reference.DUAL_CLIP,
        entropy_coeff=reference.ENTROPY_COEFFICIENT,
        use_kl_loss=True,
        kl_loss_coef=reference.KL_COEFFICIENT,
        kl_loss_type="low_var_kl",
        **common,
    )
    return DataParallelPPOActor(config, engine).update_policy(
        own, rows_per_step=len(rows), temperature=reference.TEMPERATURE, plan=plan
    )


def plan_of(case: Combination, rows: TensorDict, engine: OneDeviceEngine) -> UpdatePlan:
    """One step on all rows; the rows of a prompt stay on one rank."""
    cut = MicroBatching(rows=CUTS["rows"]["ppo_micro_batch_size_per_gpu"])
    if case.cut == "tokens":
        cut = MicroBatching(tokens=TOKENS_PER_DEVICE * engine.ranks_per_sequence)
    plan = plan_update(
        rows["attention_mask"].sum(-1).tolist(),
        rows["response_mask"].sum(-1).tolist(),
        rows_per_step=len(rows),
        micro_batching=cut,
        num_ranks=engine.get_data_parallel_size(),
        groups=prompt_groups(rows),
        components={name: tokens.tolist() for name, tokens in component_tokens(rows).items()},
    )
    return UpdatePlan.from_dict(plan.to_dict())  # as it travels


def whole_gradients(engine: OneDeviceEngine, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the optimizer kept; where ranks have parts, these follow each other."""
    kept = engine.state_dict()["optimizer"]["optimizer"]["state"].values()
    assert engine.optimizer is not None
    names = engine.optimizer.masters
    own = {
        name: local_tensor(state["gradient"]).flatten()
        for name, state in zip(names, kept, strict=True)
    }
    everyone = [own]
    if isinstance(engine, Zero1Engine | FSDPEngine):
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
    return {
        name: torch.cat([parts[name] for parts in everyone]).view_as(like[name]) for name in own
    }
