"""The worker groups of a run, and the agent loops on top of them.

Which roles there are follows from the configuration; which processes they live in, from the pools
they are mapped to (`placing`).
"""

from contextlib import ExitStack
from typing import Any

from verl.agent_loop.manager import AgentLoopManager
from verl.algos.rollout_correction.apply import choose_bypass_loss
from verl.config.async_plan import plan_of
from verl.config.ppo import PPOConfig
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.controllers import Controller, controllers
from verl.single_controller.local import LocalResourcePoolManager
from verl.trainer.distillation.teaching import Teaching
from verl.trainer.ppo.checkpointing import RunCheckpoints
from verl.trainer.ppo.demonstrations import CrossEntropyRows, components_of
from verl.trainer.ppo.placing import Placer, RolesByPool
from verl.trainer.ppo.replicas import Replicas
from verl.trainer.ppo.scoring import refuse_unsuited_reward_model
from verl.trainer.ppo.utils import Role, need_reward_model
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.scramble import keyed_seed
from verl.workers.roles.actor_rollout_ref import GeneratingWorker
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.publish import Publisher, publisher_of


class RunWorkers:
    """The members that recipes know as the trainer's; the trainer sets those without a value."""

    config: PPOConfig
    tokenizer: Any
    processor: Any
    reward_fn: Any
    val_reward_fn: Any
    train_dataset: Any
    total_training_steps: int | None
    device_name: str
    seed: int
    use_critic: bool
    use_reference_policy: bool
    use_rm: bool
    ref_in_actor: bool
    controller: Controller
    placer: Placer
    role_worker_mapping: dict[Role, type]
    resource_pool_manager: Any
    resource_pool_to_cls: dict[Any, dict[str, ClassWithInitArgs]]
    closing: ExitStack
    """Ends what was started, the last first."""

    actor_rollout_wg: Any
    rollout_wg: Any = None
    """Who generates: `actor_rollout_wg`, or a group of its own without `hybrid_engine`."""

    publisher: Publisher
    """Brings the trained weights to the engines."""

    critic_wg: Any = None
    ref_policy_wg: Any = None
    rm_wg: Any = None
    teaching: Teaching | None = None
    components: CrossEntropyRows | None = None
    """Adds rows and weights of a cross-entropy to what the actor is trained on."""

    teacher_wg: Any = None
    """Who holds the teachers of a distillation: `actor_rollout_wg`, or a group of its own."""

    async_rollout_manager: AgentLoopManager
    replicas: Replicas | None = None
    """Engines that join the run and leave it while it goes on."""

    checkpoint_manager: RunCheckpoints

    def init_workers(self) -> None:
        """Start a worker group per role, load the models, and connect the agent loops."""
        refuse_what_is_not_here(self.config)
        section = self.config.actor_rollout_ref
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:  # the actor chooses its loss when it is built
            choose_bypass_loss(correction, section.actor.policy_loss)
        if self.config.distillation.enabled:
            self.teaching = Teaching(self.config, self.tokenizer, self.train_dataset)
            self.closing.callback(self.teaching.close)
        self.components = components_of(self.config, self.tokenizer, self.seed)
        self.closing.callback(self.placer.stop)
        self.resource_pool_manager.create_resource_pool()
        groups = self.placer.start(self._roles_by_pool())
        for group in groups.values():
            for worker in group.workers:
                if isinstance(worker, GeneratingWorker):  # in this process, which goes on
                    self.closing.callback(worker.stop_rollout)
            group.seed_rank(keyed_seed(self.seed, "ranks"))
            group.init_model()
        roles = {"actor": groups[str(self._policy_role())]}
        self.actor_rollout_wg = roles["actor"]
        self.rollout_wg = groups.get(str(Role.Rollout), self.actor_rollout_wg)
        self.publisher = publisher_of(section, self.actor_rollout_wg, self.rollout_wg)
        self.publisher.publish()
        if self.use_reference_policy:
            self.ref_policy_wg = groups.get(str(Role.RefPolicy), self.actor_rollout_wg)
        if self.use_critic:
            roles["critic"] = self.critic_wg = groups[str(Role.Critic)]
        self.rm_wg = groups.get(str(Role.RewardModel))
        if self.config.distillation.enabled:
            self.teacher_wg = groups.get(str(Role.Teacher), self.actor_rollout_wg)
        self.async_rollout_manager = self._agent_loop_manager()
        self.replicas = Replicas(
            self.config,
            self.placer,
            self._replica_spec(),
            self.publisher,
            self.async_rollout_manager,
            seed=self.seed,
        )
        self.closing.callback(self.replicas.close)
        self.checkpoint_manager = RunCheckpoints(self.config, self.train_dataset, roles)

    def _fleet(self) -> Fleet | None:
        """The rollout engines, unless a manager of the user's has them."""
        manager = self.async_rollout_manager
        return manager.rollouter.servers.fleet if runs_own_loops(manager) else None

    def update_replicas(self) -> dict[str, float]:
        """Between two steps: engines join and leave, if an operator asked for it."""
        return {} if self.replicas is None else self.replicas.update()

    @property
    def num_devices(self) -> int:
        """Those that train the policy and those that generate."""
        groups = {id(group): group for group in (self.actor_rollout_wg, self.rollout_wg)}
        num_joined = 0 if self.replicas is None else self.replicas.num_ranks
        return sum(group.world_size for group in groups.values()) + num_joined

    def _policy_role(self) -> Role:
        """The role whose worker trains, and generates unless another does."""
        known = (Role.ActorRolloutRef, Role.ActorRollout)
        present = [role for role in known if role in self.role_worker_mapping]
        if not present:
            names = ", ".join(map(str, self.role_worker_mapping))
            raise ValueError(
                f"role_worker_mapping has {names}; it needs a worker for actor_rollout_ref, or for "
                "actor_rollout (and for ref where there is a reference policy)"
            )
        return present[0]

    def _roles_by_pool(self) -> RolesByPool:
        """The workers to start, the policy's first."""
        policy, section = self._policy_role(), self.config.actor_rollout_ref
        distilled = {"distillation_config": self.config.distillation}
        has_teachers = self.config.distillation.enabled
        sections: dict[Role, tuple[Any, dict[str, Any]]] = {
            policy: (section, {"role": self._duties(policy)} | (distilled if has_teachers else {}))
        }
        if Role.Teacher in self.role_worker_mapping:
            sections[Role.Teacher] = (section, distilled)
        if Role.Rollout in self.role_worker_mapping:
            sections[Role.Rollout] = (section, {})
        if self.use_reference_policy and not self.ref_in_actor:
            sections[Role.RefPolicy] = (section, {"role": str(Role.RefPolicy)})
        if self.use_critic:
            sections[Role.Critic] = (self.config.critic, {})
        if Role.RewardModel in self.role_worker_mapping:
            sections[Role.RewardModel] = (self.config.reward_model, {})
        roles: RolesByPool = {}
        for role, (options, arguments) in sections.items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            classes = roles.setdefault(self.resource_pool_manager.mapping[role], {})
            classes[str(role)] = self.controller.class_with_init_args(
                self.role_worker_mapping[role],
                options,
                device=self.device_name,
                total_training_steps=self.total_training_steps,
                **arguments,
            )
            self.resource_pool_to_cls[pool] = classes
        return roles

    def _duties(self, policy: Role) -> str:
        """What the policy's worker does: all that its role says, but what another worker does."""
        has_own_rollout = Role.Rollout in self.role_worker_mapping
        return str(policy).replace("_rollout", "") if has_own_rollout else str(policy)

    def _replica_spec(self) -> ClassWithInitArgs | None:
        """The worker of a further rollout rank; None where engines have no ranks of their own."""
        if Role.Rollout not in self.role_worker_mapping or not runs_own_loops(
            self.async_rollout_manager
        ):
            return None
        pool = self.resource_pool_manager.get_resource_pool(Role.Rollout)
        return self.resource_pool_to_cls[pool][str(Role.Rollout)]

    def stop_workers(self) -> None:
        """End all that `init_workers` has started, however far it came. May be called again."""
        self.closing.close()

    def _agent_loop_manager(self) -> AgentLoopManager:
        rollout = self.config.actor_rollout_ref.rollout
        manager = manager_class(self.config)(
            self.config,
            self.rollout_wg,
            tokenizer=self.tokenizer,
            processor=self.processor,
        )
        if isinstance(manager, AgentLoopManager):
            manager.recover_with(self.publisher.recover)
            self.closing.callback(manager.close)
        if rollout.skip_rollout:
            RolloutSkip(self.config, manager).wrap_generate_sequences()
        elif self._grades_while_generating() and runs_own_loops(manager):
            manager.grade_with(self.reward_fn, self.val_reward_fn)
        return manager

    def _grades_while_generating(self) -> bool:
        """The scores of a reward model come later, and its function needs them."""
        return self.config.reward_model.use_reward_loop and not self.use_rm


def runs_own_loops(manager: Any) -> bool:
    """Whether generation is our `Rollouter`'s, not that of a user's `generate_sequences`."""
    return generates_row_by_row(type(manager))


def generates_row_by_row(cls: type) -> bool:
    return (
        issubclass(cls, AgentLoopManager)
        and cls.generate_sequences is AgentLoopManager.generate_sequences
    )


def manager_class(config: PPOConfig) -> type[AgentLoopManager]:
    """Ours, or the one that `agent_loop_manager_class` names."""
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    return AgentLoopManager if name is None else load_class_from_fqn(name, "agent loop manager")


def controller_of(resource_pool_manager: Any) -> Controller:
    """Who runs workers in these pools."""
    is_local = isinstance(resource_pool_manager, LocalResourcePoolManager)
    return controllers["local" if is_local else "ray"]


def refuse_what_is_not_here(config: PPOConfig) -> None:
    """Settings that are valid and that this trainer cannot honour."""
    if need_reward_model(config):
        refuse_unsuited_reward_model(config)
    if plan_of(config) is not None and not generates_row_by_row(manager_class(config)):
        name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class is {name!r}, which is no "
            "AgentLoopManager or has a generate_sequences of its own: that makes whole batches, "
            "and asynchronous training starts prompts one by one. Derive it from AgentLoopManager "
            "without that method, or train synchronously (verl.trainer.main_ppo)"
        )
