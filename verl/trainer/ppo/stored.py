"""`transfer_queue.enable`: the stages of a step with the batch in a data plane.

    rollout, score      as ever: the agent loops and their grades are in this process
    annotate            the columns go into the plane; ranks get theirs, put log-probs and values
    assign_credit       one rank computes advantages from the columns in the plane
    update              ranks get their rows

From `annotate` on the driver holds a `StoredBatch`: numbers of tokens, labels, metrics. The
arithmetic is that of `PPOTrainer`, called on a rank instead of here, so a run has the same numbers.
"""

import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from verl.algos.rollout_correction.apply import compute_rollout_correction_and_add_to_batch
from verl.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.config.correction import correction_of
from verl.config.ppo import PPOConfig
from verl.config.trainer import TransferQueueConfig
from verl.data_plane import DataPlane, Limits, PlaneLost, create
from verl.data_plane.batch import StoredBatch, disconnect, put_columns
from verl.protocol import DataProto
from verl.single_controller.local import CONTROLLER as LOCAL
from verl.trainer.ppo.asynchronous import AsyncTrainer, ages_report
from verl.trainer.ppo.context import Report, StepContext
from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.metric_utils import (
    batch_metrics,
    calculate_debug_metrics,
    memory_metrics,
)
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.tripwires import SIGNALS, NonFiniteValues, not_finite, signals_of
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler, RLHFDataset
from verl.utils.torch_functional import masked_mean
from verl.workers.roles.dispatch import stored

logger = logging.getLogger(__name__)

TOKENS = ("input_ids", "prompts", "position_ids")
"""Columns that neither advantages nor reports are made from."""

Metrics = dict[str, Any]


class StoredTrainer(PPOTrainer):
    """Keeps the batch of a step in a data plane."""

    plane: DataPlane

    def init_workers(self) -> None:
        super().init_workers()
        backend = "in_process" if self.controller is LOCAL else backend_on_ray(self.config)
        name = f"{self.config.trainer.experiment_name}-{uuid.uuid4().hex[:8]}"
        queue = self.config.transfer_queue
        size = queue.backend.SimpleStorage.total_storage_size
        options = package_options(queue) if backend == "transfer_queue" else None
        self.plane = create(backend, name, Limits(max_keys=size), options)
        self.closing.callback(self._close_plane)
        logger.info("data plane %s: %s", name, backend)

    def _close_plane(self) -> None:
        try:
            self.plane.close()
        except PlaneLost as error:
            logger.warning("%s", error)
        disconnect(self.plane.name)

    # ---- stages ----------------------------------------------------------------------------------

    def annotate(self, batch: DataProto, step: StepContext) -> Any:
        self._balance_batch(batch, step.report.metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        has_log_probs = self.config.algorithm.rollout_correction.bypass_mode
        if has_log_probs or self._sampled_log_probs_will_do(batch, step):
            has_log_probs, batch = True, self._with_old_log_probs(batch, step)
        rows = stored(
            self.plane, f"step-{step.step}", batch, num_parts=self.actor_rollout_wg.world_size
        )
        if not has_log_probs:
            with step.report.timed("old_log_prob"):
                found = self.actor_rollout_wg.compute_log_prob(rows)
            step.report.merge(found.meta_info.pop("metrics"))
            rows = rows.union(found)
        if self.use_reference_policy:
            with step.report.timed("ref"):
                rows = rows.union(self.ref_policy_wg.compute_ref_log_prob(rows))
        if self.use_critic:
            with step.report.timed("values"):
                rows = rows.union(self.critic_wg.compute_values(rows))
        is_start = self.config.actor_rollout_ref.ref.model.path is None
        rows, metrics = self._on_rows(
            annotations, rows, has_computed=not has_log_probs, reference_is_start=is_start
        )
        step.report.merge(metrics)
        return rows.select_fields([name for name in rows.fields if name != "entropys"])

    def assign_credit(self, batch: Any, step: StepContext) -> Any:
        algorithm = self.config.algorithm
        control = self.kl_ctrl_in_reward if algorithm.use_kl_in_reward else None
        with step.report.timed("adv"):
            batch, (metrics, control, signals) = self._on_rows(
                credit,
                batch,
                algorithm=algorithm,
                correction=self._correction_of_rows(),
                control=control,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                reported={
                    name: value
                    for name, value in step.report.metrics.items()
                    if name == "reward/num_abstained"
                },
            )
        batch.meta_info[SIGNALS] = signals
        if control is not None:
            self.kl_ctrl_in_reward = control
        step.report.merge(metrics)
        return batch

    def _correction_of_rows(self) -> RolloutCorrectionConfig:
        return self.config.algorithm.rollout_correction

    def finish_step(self, batch: Any, step: StepContext) -> None:
        dataset = type(self.train_dataset)
        is_plain = issubclass(dataset, RLHFDataset) and (
            dataset.on_batch_end is RLHFDataset.on_batch_end
        )
        is_curriculum = isinstance(self.train_dataloader.sampler, AbstractCurriculumSampler)
        reads_rows = self.config.trainer.rollout_data_dir or is_curriculum or not is_plain
        rows: Any = batch.fetch() if isinstance(batch, StoredBatch) and reads_rows else batch
        super().finish_step(rows, step)
        self.plane.delete(list(self.plane.entries(f"step-{step.step}")))

    def _batch_metrics(self, batch: Any, report: Report) -> Metrics:
        if not isinstance(batch, StoredBatch):
            return super()._batch_metrics(batch, report)
        _, metrics = self._on_rows(
            batch_report,
            batch,
            timing=dict(report.timing),
            use_critic=self.use_critic,
            num_devices=self.num_devices,
            grad_norm=report.metrics.get("actor/grad_norm"),
        )
        return {**metrics, **memory_metrics()}

    def _on_rows(
        self, function: Callable[..., Any], batch: StoredBatch, **options: Any
    ) -> tuple[StoredBatch, Any]:
        """Run a function of the whole batch on a rank: the batch as changed, and the report."""
        fields = [name for name in batch.fields if name not in TOKENS]
        answer = self.actor_rollout_wg.execute_func_rank_zero(
            partial(on_rows, function), batch.select_fields(fields), options
        )
        changed, broken, report = answer
        batch = batch if changed is None else batch.union(changed)
        if broken:
            raise NonFiniteValues(batch.fetch(), broken)
        return batch, report


class StoredAsyncTrainer(StoredTrainer, AsyncTrainer):
    """The same where rows of later steps are generated meanwhile; these are in this process, and
    come into the plane with their step."""

    def annotate(self, batch: DataProto, step: StepContext) -> Any:
        rows = super().annotate(batch, step)
        _, metrics = self._on_rows(ages_report, rows, **self._ages_options())
        step.report.merge(metrics)
        return rows

    def _correction_of_rows(self) -> RolloutCorrectionConfig:
        choice = correction_of(self.config)
        return super()._correction_of_rows() if choice is None else choice.settings


# ---- on a rank -----------------------------------------------------------------------------------


def on_rows(
    function: Callable[..., Any], batch: StoredBatch, options: Mapping[str, Any]
) -> tuple[StoredBatch | None, list[str], Any]:
    """What the function has changed, columns that are not finite, and what it reports."""
    rows = batch.fetch()
    before = dict(rows.batch.items())
    report = function(rows, **options)
    changed = {
        name: column for name, column in rows.batch.items() if before.get(name) is not column
    }
    found = None
    if changed:
        found = put_columns(batch, function.__name__, DataProto.from_dict(tensors=changed))
    return found, not_finite(rows, *CHECKED), report


CHECKED = (
    "old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns",
)  # fmt: skip


def annotations(rows: DataProto, *, has_computed: bool, reference_is_start: bool) -> Metrics:
    """What `PPOTrainer.annotate` reports."""
    tensors, metrics = rows.batch, {}
    mask = tensors["response_mask"]
    if has_computed:
        metrics["actor/entropy"] = masked_mean(tensors["entropys"], mask).item()
        if "rollout_log_probs" in tensors.keys():  # noqa: SIM118
            metrics |= calculate_debug_metrics(rows, rows.meta_info.get("old_policy_version"))
    if "ref_log_prob" in tensors.keys():  # noqa: SIM118
        distance = tensors["old_log_probs"] - tensors["ref_log_prob"]
        metrics["actor/ref_kl"] = masked_mean(distance, mask).item()
        if reference_is_start:
            metrics["actor/ref_distance"] = masked_mean(distance.abs(), mask).item()
    return metrics


def credit(
    rows: DataProto,
    *,
    algorithm: AlgoConfig,
    correction: RolloutCorrectionConfig,
    control: Any,
    num_repeat: int,
    reported: Metrics,
) -> tuple[Metrics, Any, dict[str, float]]:
    """What `PPOTrainer.assign_credit` does; the controller of the KL penalty comes back, and what
    tripwires look at."""
    metrics: Metrics = {}
    if control is not None:
        _, metrics = apply_kl_penalty(rows, control, algorithm.kl_penalty)
    else:
        rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    if (correction.rollout_is or correction.rollout_rs) and not correction.bypass_mode:
        found, corrected = compute_rollout_correction_and_add_to_batch(rows, correction)
        rows.batch.update(found.batch)
        metrics |= corrected
    assert algorithm.adv_estimator is not None, "a recipe without one assigns credit itself"
    compute_advantage(
        rows,
        algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=num_repeat,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return metrics, control, signals_of(rows, reported)


def batch_report(rows: DataProto, **options: Any) -> Metrics:
    return batch_metrics(rows, **options)


# ---- which plane ---------------------------------------------------------------------------------


def backend_on_ray(config: PPOConfig) -> str:
    """The package TransferQueue where it is installed, else Ray's own objects."""
    chosen = config.transfer_queue.backend.storage_backend
    if find_spec("transfer_queue") is not None:
        return "transfer_queue"
    logger.warning(
        "transfer_queue.backend.storage_backend is %s, but the package TransferQueue is not "
        "installed; rows travel as objects of Ray, with the same numbers",
        chosen,
    )
    return "ray"


def package_options(queue: TransferQueueConfig) -> dict[str, Any]:
    """The options that `transfer_queue.init` knows; names are the same there."""
    backend, metrics = queue.backend, queue.metrics
    storage: dict[str, Any] = {
        "total_storage_size": backend.SimpleStorage.total_storage_size,
        "num_data_storage_units": backend.SimpleStorage.num_data_storage_units,
    }
    return {
        "backend": {
            "storage_backend": backend.storage_backend,
            "SimpleStorage": storage,
            "MooncakeStore": dict(backend.MooncakeStore),
        },
        "metrics": {"enabled": metrics.enabled, "port": metrics.port},
    }


def with_stored_batches(trainer_class: type[PPOTrainer]) -> type[PPOTrainer]:
    """The same trainer with its batches in a data plane, if its stages allow it."""
    is_async = issubclass(trainer_class, AsyncTrainer)
    known, kind = (AsyncTrainer, StoredAsyncTrainer) if is_async else (PPOTrainer, StoredTrainer)
    own = [
        stage
        for stage in ("annotate", "assign_credit", "update")
        if getattr(known, stage) is not getattr(trainer_class, stage)
    ]
    if own:
        raise ValueError(
            f"transfer_queue.enable is True, but {trainer_class.__name__} has an own {own[0]}, "
            "which reads the batch in the driver; leave transfer_queue.enable out, or let the "
            "stage take a StoredBatch and derive from StoredTrainer"
        )
    return type(f"Stored{trainer_class.__name__}", (kind, trainer_class), {})
