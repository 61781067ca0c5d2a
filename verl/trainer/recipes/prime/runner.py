"""The runner of `trainer.recipe=prime`: PRIME's trainer, and the implicit model's worker."""

from verl.config.ppo import PPOConfig
from verl.trainer.ppo.placing import REWARD_POOL, pool_of
from verl.trainer.ppo.utils import Role
from verl.trainer.recipes.prime.trainer import PrimeTrainer
from verl.trainer.recipes.prime.worker import ImplicitRewardWorker
from verl.trainer.task_runner import TaskRunner


class PrimeRunner(TaskRunner):
    """Trains a policy and the implicit reward model that rewards its tokens."""

    trainer_class = PrimeTrainer

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        self.role_worker_mapping[Role.RewardModel] = ImplicitRewardWorker
        has_pool = config.reward_model.enable_resource_pool
        self.mapping[Role.RewardModel] = (
            REWARD_POOL if has_pool else pool_of(config, "reward_model")
        )
