"""`TaskRunner`: from a configuration to a trainer that runs. Recipes override a hook or two.

Each `add_*` method chooses the worker class of a role; `run` makes tokenizer, rewards, datasets and
trainer out of the configuration, in this order, and trains.
"""

from typing import Any

from omegaconf import DictConfig

from verl.config.ppo import PPOConfig
from verl.single_controller.base.controller import Controller
from verl.single_controller.local import CONTROLLER
from verl.trainer.ppo.model_scores import asks_over_http
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.run import as_ppo_config
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.utils.dataset.prompts import set_chat_template
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.reward_model.server import RewardModelServer
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

POOL = "global_pool"
REWARD_POOL = "reward_pool"


class TaskRunner:
    """Builds and runs one training run in this process."""

    trainer_class: type[PPOTrainer] = PPOTrainer

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type] = {}
        self.mapping: dict[Role, str] = {}
        self.reward_server: RewardModelServer | None = None

    def controller(self, config: PPOConfig) -> Controller:
        """Who runs the workers."""
        num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
        if config.trainer.controller == "ray" or num_ranks > 1:
            raise ValueError(
                f"trainer.nnodes * trainer.n_gpus_per_node is {num_ranks}, trainer.controller is "
                f"{config.trainer.controller!r}; this version trains on one device in one process: "
                "set trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.controller=local"
            )
        return CONTROLLER

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[type, Any]:
        """The policy's worker class and the class of its group."""
        role = Role.ActorRolloutRef if need_reference_policy(config) else Role.ActorRollout
        self.role_worker_mapping[role] = ActorRolloutRefWorker
        self.mapping[role] = POOL
        return ActorRolloutRefWorker, self.controller(config).worker_group

    def add_critic_worker(self, config: PPOConfig) -> None:
        if need_critic(config):
            self.role_worker_mapping[Role.Critic] = CriticWorker
            self.mapping[Role.Critic] = POOL

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        if need_reward_model(config):
            self.role_worker_mapping[Role.RewardModel] = RewardModelWorker
            has_pool = config.reward_model.enable_resource_pool
            self.mapping[Role.RewardModel] = REWARD_POOL if has_pool else POOL

    def add_ref_policy_worker(self, config: PPOConfig, ref_policy_cls: type) -> None:
        """The reference lives in the policy's worker; a recipe may give it one of its own."""

    def init_resource_pool_mgr(self, config: PPOConfig) -> Any:
        pools = {POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        model = config.reward_model
        if REWARD_POOL in self.mapping.values():
            pools[REWARD_POOL] = [model.n_gpus_per_node] * model.nnodes
        return self.controller(config).resource_pool_manager(pools, self.mapping)

    def served_reward_model(self, config: PPOConfig) -> dict[str, Any]:
        """What a custom reward function needs that asks the reward model by itself."""
        if not asks_over_http(config):
            return {}
        model = config.reward_model.model
        self.reward_server = RewardModelServer()
        tokenizer = hf_tokenizer(
            copy_to_local(model.path), trust_remote_code=model.trust_remote_code
        )
        return {
            "reward_router_address": self.reward_server.address,
            "reward_model_tokenizer": tokenizer,
        }

    def run(self, config: PPOConfig | DictConfig) -> None:
        trainer = self.build(as_ppo_config(config))
        try:
            trainer.init_workers()
            if self.reward_server is not None:
                self.reward_server.score_texts = trainer.rm_wg.workers[0].score_texts
            trainer.fit()
        finally:
            if self.reward_server is not None:
                self.reward_server.close()

    def build(self, config: PPOConfig) -> PPOTrainer:
        """The trainer, its workers not yet started."""
        import_external_libs(config.actor_rollout_ref.model.external_lib)
        worker_class, group_class = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, worker_class)
        tokenizer, processor = load_tokenizer(config)
        kwargs = {**config.reward_model.reward_kwargs, **self.served_reward_model(config)}
        return self.trainer_class(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=group_class,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **kwargs),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1, **kwargs),
            controller=self.controller(config),
        )


def load_tokenizer(config: PPOConfig) -> tuple[Any, Any]:
    """The tokenizer, with the chat template that the configuration names, and the processor."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(config.data.tokenizer or model.tokenizer_path or model.path)
    trusts = config.data.trust_remote_code or model.trust_remote_code
    tokenizer = hf_tokenizer(path, trust_remote_code=trusts)
    set_chat_template(tokenizer, config.data.chat_template or model.custom_chat_template)
    return tokenizer, hf_processor(path, trust_remote_code=trusts)
