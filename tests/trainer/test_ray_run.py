"""The same run on Ray: the runner and its workers are actors, and recipes of one's own work."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.clusters import assert_given_back
from tests.toy import ROLLOUT, toy_overrides, toy_run
from tests.trainer.recipes.test_prime import prime_run, prime_settings
from tests.trainer.test_async_placing import separate
from tests.trainer.test_engine_processes import without_engine_metrics
from tests.trainer.test_ranks import EVERYTHING, assert_same_run
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.common import Termination
from verl.trainer.main_ppo import run_ppo
from verl.trainer.on_ray import wait_for_start
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.replicas import FILE as REPLICAS
from verl.trainer.ppo.utils import Role
from verl.trainer.task_runner import TaskRunner
from verl.utils.environment import BadData, temp_env_var
from verl.workers.roles import ActorRolloutRefWorker

# Each run starts processes that import torch, which takes its time on busy cores.
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

ROLLOUT_APART = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
)
ON_RAY = ("trainer.controller=ray", "trainer.n_gpus_per_node=2")


def ray_run(toy, output, *changes, task_runner_class=None):
    """The metrics that a run on Ray wrote."""
    output.mkdir(exist_ok=True)
    log = output / "metrics.jsonl"
    with temp_env_var("VERL_FILE_LOGGER_PATH", str(log)):
        config = OmegaConf.from_dotlist([*toy_overrides(toy, output), *ON_RAY, *changes])
        run_ppo(config, task_runner_class)
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return [{"step": line["step"], **line["data"]} for line in lines]


@pytest.mark.slow  # 40 s: three actors import everything
def test_two_actors_with_a_critic_elsewhere_train_as_one_process_does(toy, tmp_path):
    apart = (
        "trainer.n_gpus_per_node=3",
        "resource_pool.actor_rollout_ref.devices=[0,1]",
        "resource_pool.critic.devices=[2]",
    )
    found = ray_run(toy, tmp_path / "ray", *EVERYTHING, *apart)
    expected, _ = toy_run(toy, tmp_path / "here", *EVERYTHING)
    assert_same_run(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_actors_that_only_generate_give_the_run_of_one_process(toy, tmp_path):
    changes = (*EVERYTHING, "trainer.n_gpus_per_node=1")
    found = ray_run(toy, tmp_path / "ray", *changes, *ROLLOUT_APART)
    expected, _ = toy_run(toy, tmp_path / "here", *EVERYTHING)
    assert_same_run(found, expected)


def without_waiting(metrics):
    """Who waited for whom is a matter of real time."""
    real = ("fully_async/", "rollouter/", "trainer/idle_ratio")
    return [{k: v for k, v in step.items() if not k.startswith(real)} for step in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "native_process"])
def test_actors_that_generate_while_others_train_give_the_run_of_one_engine(toy, tmp_path, name):
    expected, trainer = toy_run(
        toy, tmp_path / "here", *separate(tmp_path / "here"), trainer_class=AsyncTrainer
    )
    trainer.stop_workers()
    changes = [*separate(tmp_path / "ray", "ranks"), "trainer.controller=ray"]
    found = ray_run(
        toy, tmp_path / "ray", *changes, f"{ROLLOUT}.name={name}", "trainer.n_gpus_per_node=1"
    )
    assert_same_run(
        without_waiting(without_engine_metrics(found)),
        without_waiting(without_engine_metrics(expected)),
    )


@pytest.mark.slow
def test_a_replica_joins_in_a_placement_group_of_its_own_and_the_run_is_the_same(toy, tmp_path):
    here, there = tmp_path / "here", tmp_path / "ray"
    expected, trainer = toy_run(toy, here, *separate(here), trainer_class=AsyncTrainer)
    trainer.stop_workers()
    there.mkdir()
    (there / REPLICAS).write_text("2")
    found = ray_run(
        toy,
        there,
        *separate(there, "rank"),
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={there}",
        "actor_rollout_ref.model.external_lib=tests.patient_trainer",
    )
    assert [step.pop("rollout/num_engines") for step in found] == [1, 2, 2, 2, 2, 2]
    assert_same_run(
        without_waiting(without_engine_metrics(found)),
        without_waiting(without_engine_metrics(expected)),
    )


@pytest.mark.slow
def test_sessions_of_several_rows_train_on_ray_as_in_one_process(toy, tmp_path):
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: tried\n  _target_: tests.trainer.test_sessions.Cutting\n")
    changes = (
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tried",
        "data.max_prompt_length=16",
    )
    found = ray_run(toy, tmp_path / "ray", *changes)
    expected, trainer = toy_run(toy, tmp_path / "here", *changes)
    assert len(trainer.batch) > 16  # more rows than samples
    assert_same_run(found, expected)


@pytest.mark.slow
def test_an_error_that_ends_the_run_reaches_the_driver_as_itself(toy, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": None}) + "\n")
    with pytest.raises(BadData, match="prompt is null"):
        ray_run(toy, tmp_path, f"data.train_files={bad}")


class RecipeWorker(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{name} from rank {self.rank} of {self.world_size}"


class RecipeTrainer(RayPPOTrainer):
    """A loop of its own, on the worker group's methods alone."""

    def fit(self):
        report = {"greetings": self.actor_rollout_wg.greet("hello"), "kl": [], "norms": []}
        for rows in (self.train_dataloader.next_batch() for _ in range(2)):
            prompts = DataProto.from_single_dict(rows).repeat(2, interleave=True)
            prompts.meta_info = {"do_sample": True}
            batch = self.actor_rollout_wg.generate_sequences(prompts)
            batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
            batch.meta_info.pop("metrics", None)
            difference = batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]
            report["kl"].append(difference.abs().max().item())
            sign = torch.tensor([1.0, -1.0]).repeat(len(batch) // 2)
            mask = batch.batch["response_mask"]
            batch.batch["advantages"] = sign[:, None] * mask
            metrics = self.actor_rollout_wg.update_actor(batch).meta_info["metrics"]
            report["norms"].append(float(np.mean(metrics["actor/grad_norm"])))
            report["responses"] = batch.batch["responses"].tolist()
        path = Path(self.config.trainer.default_local_dir)
        path.mkdir(parents=True, exist_ok=True)
        (path / "report.json").write_text(json.dumps(report))


class RecipeRunner(TaskRunner):
    trainer_class = RecipeTrainer

    def add_actor_rollout_worker(self, config):
        import ray

        from verl.single_controller.ray import RayWorkerGroup

        self.role_worker_mapping[Role.ActorRollout] = ray.remote(RecipeWorker)
        self.mapping[Role.ActorRollout] = "global_pool"
        return RecipeWorker, RayWorkerGroup


@pytest.mark.slow
def test_a_recipe_with_its_own_loop_worker_and_runner_runs(toy, tmp_path):
    import ray

    odd = "data.train_batch_size=5"  # ten rows on two ranks, then over three passes each
    changes = (odd, "actor_rollout_ref.actor.ppo_mini_batch_size=5")
    ray_run(toy, tmp_path, *changes, task_runner_class=ray.remote(RecipeRunner))
    report = json.loads((tmp_path / "checkpoints/report.json").read_text())
    assert report["greetings"] == ["hello from rank 0 of 2", "hello from rank 1 of 2"]
    assert max(report["kl"]) < 1e-5, "the rollout follows the updates"
    assert all(norm > 0 for norm in report["norms"])
    assert len(report["responses"]) == 10


@pytest.mark.slow
def test_a_run_that_is_over_has_given_back_what_it_reserved(toy, tmp_path):
    ray_run(toy, tmp_path, "trainer.total_training_steps=1")
    assert_given_back()


def test_a_runner_without_a_place_is_reported_and_given_up(caplog):
    import ray

    runner = ray.remote(num_cpus=1000)(TaskRunner).remote()
    with pytest.raises(ValueError, match=r"no place for the run's runner within 3 s: .*'CPU'"):
        wait_for_start(ray, runner, 1, 3, Termination())
    assert "the runner waits for a place" in caplog.text
    ray.kill(runner)


def test_a_run_on_ray_that_is_asked_to_stop_before_it_has_begun_ends_at_once():
    import ray

    runner = ray.remote(num_cpus=1000)(TaskRunner).remote()  # there is no place for it
    with Termination() as termination:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ending:
            wait_for_start(ray, runner, 60, 60, termination)
    assert ending.value.code == 128 + signal.SIGTERM
    ray.kill(runner)


class KillsAnActorOnce(RayPPOTrainer):
    has_killed = False

    def update(self, batch, step):
        import ray

        if self.global_steps == 2 and not KillsAnActorOnce.has_killed:
            KillsAnActorOnce.has_killed = True
            ray.kill(self.actor_rollout_wg.workers[1])
        return super().update(batch, step)


class RunnerThatLosesAnActor(TaskRunner):
    trainer_class = KillsAnActorOnce


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_actor_is_replaced_and_the_run_continues_from_its_last_commit(toy, tmp_path):
    changes = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    expected, _ = toy_run(toy, tmp_path / "straight", *changes)
    runner = RunnerThatLosesAnActor
    found = ray_run(toy, tmp_path / "broken", *changes, task_runner_class=runner)
    assert [step["step"] for step in found] == [1, 2, 3]
    assert_same_run(found, expected)


class TermsItsDriver(RayPPOTrainer):
    """As when a scheduler asks the driver to end, during the first step."""

    def update(self, batch, step):
        if self.global_steps == 1:
            os.kill(self.config.trainer.driver_pid, signal.SIGTERM)
            time.sleep(3)  # the driver looks once a second
        return super().update(batch, step)


class RunnerThatIsAskedToStop(TaskRunner):
    trainer_class = TermsItsDriver


@pytest.mark.slow
def test_a_driver_that_is_asked_to_stop_lets_the_run_finish_its_step_and_save(toy, tmp_path):
    changes = (
        "trainer.total_training_steps=5",
        "trainer.save_freq=100",
        f"trainer.driver_pid={os.getpid()}",
    )
    found = ray_run(toy, tmp_path, *changes, task_runner_class=RunnerThatIsAskedToStop)
    assert [step["step"] for step in found] == [1]
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actors_have_engines_in_processes_of_their_own(toy, tmp_path):
    expected, _ = toy_run(toy, tmp_path / "here")
    name = "actor_rollout_ref.rollout.name=native_process"
    found = ray_run(toy, tmp_path / "ray", name)
    assert [step["rollout/engine_restarts"] for step in found] == [0, 0]
    of_engines = ("rollout/canary_max_diff", "rollout/engine_restarts", "rollout/redispatched")
    assert_same_run(
        [{k: v for k, v in step.items() if k not in of_engines} for step in found], expected
    )


@pytest.mark.slow
def test_prime_trains_its_reward_model_on_ray_as_one_process_does(toy, tmp_path):
    changes = ("reward_model.model.optim.lr=0.003", "reward_model.mini_batch_size=2")
    expected, _ = prime_run(toy, tmp_path / "here", *changes)
    settings = prime_settings(toy, *changes)
    assert_same_run(ray_run(toy, tmp_path / "ray", *settings), expected)
