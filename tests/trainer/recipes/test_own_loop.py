"""A recipe in the style that verl's users write: a trainer with a loop of its own, its own worker.

The loop is the long one: rows become a batch, responses join it column by column, and each quantity
is asked of a worker group by name. It does what `PPOTrainer` does, so its weights are the same.
"""

from pprint import pformat

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.toy import KeepsTrainer, toy_run, weights
from verl import DataProto
from verl.board.reader import StoreReader
from verl.board.store import FILE_NAME
from verl.replay import main as replay
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer,
    Role,
    apply_kl_penalty,
    compute_advantage,
    compute_data_metrics,
    compute_response_mask,
    compute_throughout_metrics,
    compute_timing_metrics,
    marked_timer,
    reduce_metrics,
)
from verl.trainer.ppo.reward import compute_reward
from verl.utils.scramble import keyed_seed
from verl.utils.tracking import Tracking
from verl.workers.fsdp_workers import ActorRolloutRefWorker

BOARD = "trainer.board=true"
SETTINGS = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
]


class CountingWorker(ActorRolloutRefWorker):
    """A worker of the recipe's own, with a method of its own."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learning_rate(self) -> float:
        return float(self.config.actor.optim.lr)


class OwnLoop(RayPPOTrainer):
    """`fit` is a copy of the usual loop, as recipes have it."""

    def fit(self):
        settings = OmegaConf.to_container(self.config, resolve=True)
        assert pformat(settings)
        with open_dict(self.config):
            self.config.trainer.note = "set by the recipe"
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=settings,
        )
        self.global_steps = 0
        self._load_checkpoint()
        self.rates = self.actor_rollout_wg.learning_rate()
        self.global_steps += 1
        for _ in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                metrics, timing_raw = {}, {}
                with marked_timer("step", timing_raw):
                    batch = self.train_on(batch_dict, metrics, timing_raw)
                metrics.update({"training/global_step": self.global_steps})
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
                metrics.update(
                    compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=1)
                )
                logger.log(data=metrics, step=self.global_steps)
                if self.global_steps >= self.total_training_steps:
                    return
                self.global_steps += 1

    def train_on(self, batch_dict, metrics, timing_raw):
        num_samples = self.config.actor_rollout_ref.rollout.get("n", 1)
        batch = DataProto.from_single_dict(batch_dict)
        uids = [f"{self.global_steps}-{row}" for row in range(len(batch))]
        batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        gen_batch = self._get_gen_batch(batch)
        gen_batch.meta_info["global_steps"] = self.global_steps
        gen_batch = gen_batch.repeat(repeat_times=num_samples, interleave=True)
        seeds = [
            keyed_seed(self.seed, "training", self.global_steps, uid, sample)
            for uid in uids
            for sample in range(num_samples)
        ]
        gen_batch.non_tensor_batch["sampling_seed"] = np.array(seeds, dtype=object)
        with marked_timer("gen", timing_raw, color="red"):
            output = self.async_rollout_manager.generate_sequences(gen_batch)
        timing_raw.update(output.meta_info.pop("timing"))
        batch = batch.repeat(repeat_times=num_samples, interleave=True)
        batch = batch.union(output)
        if "response_mask" not in batch.batch.keys():  # noqa: SIM118
            batch.batch["response_mask"] = compute_response_mask(batch)
        self._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        reward_tensor, extras = compute_reward(batch, self.reward_fn)

        old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
        entropy = agg_loss(
            loss_mat=old_log_prob.batch["entropys"],
            loss_mask=batch.batch["response_mask"],
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
        )
        metrics.update({"actor/entropy": entropy.item()})
        old_log_prob.batch.pop("entropys")
        batch = batch.union(old_log_prob)
        if self.use_reference_policy:
            batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        if self.use_critic:
            batch = batch.union(self.critic_wg.compute_values(batch))

        batch.batch["token_level_scores"] = reward_tensor
        if extras:
            batch.non_tensor_batch.update({k: np.array(v) for k, v in extras.items()})
        if self.config.algorithm.use_kl_in_reward:
            batch, found = apply_kl_penalty(
                batch, self.kl_ctrl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
            )
            metrics.update(found)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        batch = compute_advantage(
            batch,
            adv_estimator=self.config.algorithm.adv_estimator,
            gamma=self.config.algorithm.gamma,
            lam=self.config.algorithm.lam,
            num_repeat=num_samples,
            norm_adv_by_std_in_grpo=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),
            config=self.config.algorithm,
        )
        if self.use_critic:
            critic_output = self.critic_wg.update_critic(batch)
            metrics.update(reduce_metrics(critic_output.meta_info["metrics"]))
        if self.config.trainer.critic_warmup <= self.global_steps:
            actor_output = self.actor_rollout_wg.update_actor(batch)
            metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
        return batch


class OwnRunner(KeepsTrainer):
    """Registers the recipe's worker by its role."""

    def add_actor_rollout_worker(self, config):
        _, group = super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRolloutRef] = CountingWorker
        return CountingWorker, group


def test_a_loop_of_its_own_over_our_workers_gives_the_weights_of_our_loop(toy, tmp_path, capsys):
    changes = [*SETTINGS, BOARD, f"custom_reward_function.path={toy / 'parity.py'}"]
    ours, here = toy_run(toy, tmp_path / "ours", *changes)
    theirs, there = toy_run(
        toy, tmp_path / "theirs", *changes, trainer_class=OwnLoop, runner_class=OwnRunner
    )
    assert [step["step"] for step in theirs] == [1, 2]
    assert isinstance(there.config, DictConfig)
    assert there.config.trainer.note == "set by the recipe"
    assert there.rates == [0.01]
    for one, other in zip(ours, theirs, strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "critic/vf_loss"):
            assert other[name] == pytest.approx(one[name], abs=1e-6), name
    pairs = zip(weights(here).values(), weights(there).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert_recorded_alike(tmp_path / "ours", tmp_path / "theirs")
    assert replay([str(tmp_path / "theirs"), "--step", "1"]) == 2
    assert "made by tests.trainer.recipes.test_own_loop.OwnLoop.fit" in capsys.readouterr().err


def assert_recorded_alike(ours, theirs):
    """The run page of a loop of its own has the steps, samples and time that ours has."""
    one, other = (StoreReader(folder / "checkpoints" / FILE_NAME) for folder in (ours, theirs))
    assert [entry["step"] for entry in other.steps()] == [1, 2]
    for entry in other.steps():
        assert entry["metrics"]["critic/score/mean"] is not None
        assert entry["seconds"]["gen"] > 0
    for step in (1, 2):
        pairs = list(zip(one.trained(step), other.trained(step), strict=True))
        assert len(pairs) == 16
        for a, b in pairs:
            assert a["tokens"] == b["tokens"]
            assert a["score"] == b["score"]
            assert a["columns"]["advantage"] == pytest.approx(b["columns"]["advantage"], abs=1e-4)


class AroundOurs(RayPPOTrainer):
    def fit(self):
        super().fit()


class Silent(RayPPOTrainer):
    def fit(self):
        """Logs nothing and trains nothing."""


def test_a_fit_that_calls_ours_is_recorded_once(toy, tmp_path, caplog):
    toy_run(toy, tmp_path, BOARD, "data.val_files=[]", trainer_class=AroundOurs)
    reader = StoreReader(tmp_path / "checkpoints" / FILE_NAME)
    assert [entry["step"] for entry in reader.steps()] == [1, 2]
    assert reader.samples()["count"] == 32
    assert "recorded" not in caplog.text


def test_a_fit_that_cannot_be_followed_says_so(toy, tmp_path, caplog):
    toy_run(toy, tmp_path, BOARD, "data.val_files=[]", trainer_class=Silent)
    assert "nothing is recorded of this run: its trainer has a fit of its own" in caplog.text
