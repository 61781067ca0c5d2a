"""A run whose ranks are struck on cue."""

from typing import Any

from tests.chaos.strikes import Failpoints, Strikes
from tests.toy import KeepsTrainer
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.failures import WorkerError
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker


class VictimActor(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        points = Failpoints(self.config.model.path, "actor", self.rank)
        points.before(self.generator.poller, "poll", "generate")
        points.before(self.policy, "compute_log_prob", "old log-prob")
        points.before(self.policy, "update_policy", "update")
        points.amid_tensors(self.engine, "get_per_tensor_param", "weight sync")
        points.amid_writes(self.checkpoints, "capture", "save")


class VictimCritic(CriticWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        points = Failpoints(self.config.model.path, "critic", self.rank)
        points.before(self.critic, "compute_values", "old log-prob")
        points.before(self.critic, "update_critic", "update")
        points.amid_writes(self.checkpoints, "capture", "save")


class StruckTrainer(PPOTrainer):
    @property
    def strikes(self) -> Strikes:
        return Strikes.beside(self.config.actor_rollout_ref.model.path)

    def rollout(self, step: StepContext) -> DataProto:
        self.strikes.arm(step.step)
        self.strikes.strike_from_driver("rollout", step.step)
        return super().rollout(step)

    def score(self, batch: DataProto, step: StepContext) -> DataProto:
        self.strikes.strike_from_driver("score", step.step)
        return super().score(batch, step)

    def update(self, batch: DataProto, step: StepContext) -> DataProto:
        self.strikes.strike_from_driver("update_actor", step.step)
        return super().update(batch, step)

    def fit(self) -> None:
        try:
            super().fit()
        except WorkerError as error:
            self.strikes.note("lost", kind=type(error).__name__, message=str(error))
            raise

    def finish_step(self, batch: DataProto | None, step: StepContext) -> None:
        super().finish_step(batch, step)
        self.strikes.note("finished", step=self.global_steps)


class VictimRunner(KeepsTrainer):
    trainer_class = StruckTrainer

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, Any]:
        found = super().add_actor_rollout_worker(config)
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = VictimActor
        return found

    def add_critic_worker(self, config: Any) -> None:
        super().add_critic_worker(config)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = VictimCritic
