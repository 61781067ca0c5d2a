"""`TaskRunner`: from a configuration to a trainer that runs. Recipes override a hook or two.

Each `add_*` method chooses the worker class of a role and its pool; `run` makes tokenizer, rewards,
datasets and trainer out of the configuration, in this order, and trains. When worker processes die
or hang, everything is made anew and continues from the last checkpoint, as a new process would.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.config.async_plan import plan_of
from verl.config.distillation import teachers_of
from verl.config.ppo import PPOConfig
from verl.config.roles import async_mode
from verl.data_plane import PlaneLost
from verl.models.loading import read_config
from verl.single_controller.base.failures import WorkerDied, WorkerError, WorkerTimeout
from verl.single_controller.controllers import Controller, controllers
from verl.single_controller.local.fork_server import keeping_servers
from verl.trainer.plan.layout import controller as controller_name
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.trainer.ppo.checkpointing import run_locks
from verl.trainer.ppo.placing import REWARD_POOL, ROLLOUT_POOL, TEACHER_POOL, make_pools, pool_of
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.scoring import asks_over_http
from verl.trainer.ppo.session import as_ppo_config
from verl.trainer.ppo.stored import with_stored_batches
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from verl.trainer.ppo.v1.trainers import trainer_of_mode
from verl.utils.checkpoint.layout import holding
from verl.utils.dataset.prompts import set_chat_template
from verl.utils.device import resolve_device
from verl.utils.environment import BadData, ending_of, forced_device, refusing
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.user_files import BrokenFile
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_model.server import RewardModelServer
from verl.workers.roles import (
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
    TeacherWorker,
)

logger = logging.getLogger(__name__)


class NoTokenizer(BadData, OSError):
    """The model's folder is not there, or has no tokenizer."""


class TaskRunner:
    """Builds and runs one training run, in this process or as an actor of a Ray cluster."""

    trainer_class: type[PPOTrainer] = PPOTrainer

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type] = {}
        self.mapping: dict[Role, str] = {}
        self.reward_server: RewardModelServer | None = None
        self.trainer: PPOTrainer | None = None
        self.is_stop_requested = False
        self.closing = ExitStack()
        """Ends what an attempt has started."""

    def trainer_for(self, config: PPOConfig) -> type[PPOTrainer]:
        """A recipe's `trainer_class`, else the trainer of the mode: built in, or registered."""
        cls = self.trainer_class
        if cls is PPOTrainer:
            cls = trainer_of_mode(async_mode(config))
        if plan_of(config) is None or issubclass(cls, AsyncTrainer):
            return cls
        raise ValueError(
            f"{cls.__name__} cannot train asynchronously; a recipe for that derives "
            "its trainer from verl.trainer.ppo.asynchronous.AsyncTrainer"
        )

    def controller(self, config: PPOConfig) -> Controller:
        """Who runs the workers."""
        return controllers[controller_name(config)]

    def device(self, config: PPOConfig) -> str:
        """What the workers run on. A runner on Ray sees no device; the driver has told it."""
        return forced_device() or resolve_device(config.trainer.device)

    def add_actor_rollout_worker(self, config: PPOConfig) -> tuple[type, Any]:
        """The policy's worker class and the class of its group."""
        role = Role.ActorRolloutRef if need_reference_policy(config) else Role.ActorRollout
        self.role_worker_mapping[role] = ActorRolloutRefWorker
        self.mapping[role] = pool_of(config, "actor_rollout_ref")
        return ActorRolloutRefWorker, self.controller(config).worker_group

    def add_rollout_worker(self, config: PPOConfig) -> None:
        """A worker that only generates, where generation has ranks of its own."""
        if not config.actor_rollout_ref.hybrid_engine:
            self.role_worker_mapping[Role.Rollout] = RolloutWorker
            self.mapping[Role.Rollout] = ROLLOUT_POOL

    def add_critic_worker(self, config: PPOConfig) -> None:
        if need_critic(config):
            self.role_worker_mapping[Role.Critic] = CriticWorker
            self.mapping[Role.Critic] = pool_of(config, "critic")

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        if need_reward_model(config):
            self.role_worker_mapping[Role.RewardModel] = RewardModelWorker
            has_pool = config.reward_model.enable_resource_pool
            shared = pool_of(config, "reward_model")
            self.mapping[Role.RewardModel] = REWARD_POOL if has_pool else shared

    def add_teacher_worker(self, config: PPOConfig) -> None:
        """A worker that only teaches, where the teachers of a distillation have own ranks."""
        section = config.distillation
        teachers = teachers_of(section).values() if section.enabled else ()
        if section.nnodes and not all(teacher.is_served for teacher in teachers):
            self.role_worker_mapping[Role.Teacher] = TeacherWorker
            self.mapping[Role.Teacher] = TEACHER_POOL

    def add_ref_policy_worker(self, config: PPOConfig, ref_policy_cls: type) -> None:
        """The reference lives in the policy's worker; a recipe may give it one of its own."""

    def init_resource_pool_mgr(self, config: PPOConfig) -> Any:
        return make_pools(config, self.mapping, self.controller(config), self.device(config))

    def served_reward_model(self, config: PPOConfig) -> dict[str, Any]:
        """What a custom reward function needs that asks the reward model by itself."""
        if not asks_over_http(config):
            return {}
        model = config.reward_model.model
        self.reward_server = RewardModelServer()
        self.closing.callback(self.reward_server.close)
        tokenizer = hf_tokenizer(
            copy_to_local(model.path), trust_remote_code=model.trust_remote_code
        )
        return {
            "reward_router_address": self.reward_server.address,
            "reward_model_tokenizer": tokenizer,
        }

    def run(self, config: PPOConfig | DictConfig) -> None:
        """Train; start over from the last checkpoint when workers are lost."""
        config = as_ppo_config(config)
        with holding(run_locks(config.trainer)), keeping_servers():
            self._train_until_done(config)

    def _train_until_done(self, config: PPOConfig) -> None:
        """However an attempt ends, what it has started ends with it: the caller may go on."""
        for restarts_left in range(config.trainer.max_restarts, -1, -1):
            with self.closing:
                with refusing():
                    trainer = self.build(copy.deepcopy(config))  # workers write into theirs
                self.trainer = trainer
                self.closing.callback(trainer.stop_workers)
                if self.is_stop_requested:
                    trainer.request_stop()
                trainer.is_restart = restarts_left < config.trainer.max_restarts
                try:
                    self._train(trainer)
                    return
                except (WorkerError, PlaneLost) as error:
                    ending = ending_of(error)
                    if ending is not None:
                        raise ending from None
                    if restarts_left == 0 or not is_loss(error):
                        raise
                    logger.error("%s\n%s", error, _next_attempt(trainer, restarts_left))
            continue_from_own_commit(config, trainer)  # nothing of the attempt saves any more

    def request_stop(self) -> None:
        """Finish the step that runs, save, and end; a trainer that is not built yet makes none."""
        self.is_stop_requested = True
        if self.trainer is not None:
            self.trainer.request_stop()

    def _train(self, trainer: PPOTrainer) -> None:
        trainer.init_workers()
        if self.reward_server is not None:
            self.reward_server.score_texts = trainer.rm_wg.score_texts
        trainer.fit()

    def build(self, config: PPOConfig) -> PPOTrainer:
        """The trainer, its workers not yet started."""
        import_external_libs(config.actor_rollout_ref.model.external_lib)
        worker_class, group_class = self.add_actor_rollout_worker(config)
        self.add_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_teacher_worker(config)
        self.add_ref_policy_worker(config, worker_class)
        tokenizer, processor = load_tokenizer(config)
        model = config.actor_rollout_ref.model
        if model.hf_overrides():  # what is wrong with it is said here, not by a rank
            path = copy_to_local(model.path)
            read_config(path, model.hf_overrides(), model.trust_remote_code)
        kwargs = {**config.reward_model.reward_kwargs, **self.served_reward_model(config)}
        trainer_class = self.trainer_for(config)
        if config.transfer_queue.enable:
            trainer_class = with_stored_batches(trainer_class)
        return trainer_class(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=group_class,
            reward_fn=self._reward_manager(config, tokenizer, 0, kwargs),
            val_reward_fn=self._reward_manager(config, tokenizer, 1, kwargs),
            controller=self.controller(config),
            device_name=self.device(config),
        )

    def _reward_manager(
        self, config: PPOConfig, tokenizer: Any, num_examine: int, kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        manager = load_reward_manager(config, tokenizer, num_examine, **kwargs)
        if isinstance(manager, AbstractRewardManager):
            self.closing.callback(manager.close)
        return manager


def is_loss(error: BaseException) -> bool:
    """Whether a worker or the data plane is gone, which another attempt may cure."""
    lost = (WorkerDied, WorkerTimeout, PlaneLost)  # the plane as the driver or a rank finds it
    return isinstance(error, lost) or isinstance(error.__cause__, PlaneLost)


def continue_from_own_commit(config: PPOConfig, trainer: PPOTrainer) -> None:
    """What this run has saved is where it goes on; else it begins as it did the first time."""
    step = trainer.checkpoint_manager.committed_step if trainer.has_committed else None
    if step is not None:
        folder = Path(config.trainer.default_local_dir).expanduser()
        config.trainer.resume_mode = "resume_path"
        config.trainer.resume_from_path = str(folder / f"global_step_{step}")


def _next_attempt(trainer: PPOTrainer, restarts_left: int) -> str:
    start = "from the beginning"
    if trainer.last_saved_step:
        start = f"after step {trainer.last_saved_step}"
    return (
        f"step {trainer.global_steps} was lost with a worker; starting the workers anew, {start} "
        f"(trainer.max_restarts leaves {restarts_left - 1} more)"
    )


def load_tokenizer(config: PPOConfig) -> tuple[Any, Any]:
    """The tokenizer, with the chat template that the configuration names, and the processor."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(config.data.tokenizer or model.tokenizer_path or model.path)
    trusts = config.data.trust_remote_code or model.trust_remote_code
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=trusts)
    except BrokenFile:
        raise
    except (OSError, ValueError) as error:
        raise NoTokenizer(
            f"no tokenizer at {path!r} (data.tokenizer, actor_rollout_ref.model.tokenizer_path or "
            "actor_rollout_ref.model.path, the first that is set): neither a folder with one nor a "
            f"name that the Hugging Face hub gave one for; name an existing folder. {error}"
        ) from error
    set_chat_template(tokenizer, config.data.chat_template or model.custom_chat_template)
    processor = hf_processor(path, trust_remote_code=trusts)
    template = None if processor is None else processor.chat_template
    if tokenizer.chat_template is None and isinstance(template, str):
        set_chat_template(tokenizer, template)  # older files have it there alone
    return tokenizer, processor
