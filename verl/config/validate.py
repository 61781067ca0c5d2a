"""Relations between sections, checked before anything heavy is loaded.

Each rule is a small generator of faults; `validate` runs them all, so that a user sees every
mistake at once. Rules about one value alone are metadata of its field; those about the algorithm
and generation are in `validate_parts`, those about this machine in `validate_machine`. A key
already at fault is not reported twice.
`advice` names configurations that are allowed and probably not meant.
"""

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

from omegaconf import DictConfig

from verl.config.actor import McoreActorConfig
from verl.config.async_plan import async_faults, plan_of
from verl.config.base import BaseConfig
from verl.config.distillation import component_faults, distillation_faults
from verl.config.effects import absent_faults
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.faults import ConfigError, Fault, nearest_divisors, nearest_multiples, shown
from verl.config.load import global_sizes, load_config
from verl.config.optimizer import LOOK_AT_SHAPES
from verl.config.packages import unchecked_engine_arguments
from verl.config.ppo import PPOConfig
from verl.config.roles import (
    GROUP_ESTIMATORS,
    POOL_ROLES,
    Roles,
    data_parallel_size,
    did_you_mean,
    engine_of,
    pool_devices,
    ranks_per_sequence,
    role_ranks,
    runs_prime,
    sequence_ranks,
    world_size,
)
from verl.config.schema import Keys, walk_leaves
from verl.config.sft import SFTConfig, SFTEngineConfig, SFTEngineDataConfig
from verl.config.validate_machine import machine_faults
from verl.config.validate_parts import algorithm_faults, rollout_faults

ACTOR = "actor_rollout_ref.actor"
ALWAYS_CHECKED = {f"{ACTOR}.strategy"}
"""What a configuration file may choose without the user setting a key."""
MANAGERS_THAT_ASK_A_FUNCTION = (
    "batch", "dapo", "judge", "limited", "prime", "rate_limited", "remote",
)  # fmt: skip
"""Reward managers of ours that do nothing where a model's score is the reward."""


def validate(
    config: BaseConfig,
    user_set: frozenset[str] = frozenset(),
    *,
    known_faults: list[Fault] | None = None,
    names_are_open: bool = False,
    roles: Roles | None = None,
) -> list[Fault]:
    """All faults of a configuration, those found while loading first.

    What asks for something that does not exist is refused before its relations are looked at.
    `names_are_open` says that the caller's program may have registered estimators and losses, so
    that an unknown name is none of our business; `roles` replaces what the configuration implies.
    """
    faults = list(known_faults or [])
    absent = list(absent_faults(config, user_set | ALWAYS_CHECKED, has_own_code=names_are_open))
    if absent:
        return without_followers(faults + absent, user_set)
    at_fault = {key for fault in faults for key in fault.keys}
    relations = relation_faults(config, user_set, names_are_open=names_are_open, roles=roles)
    related = [*relations, *machine_faults(config)]
    faults += [fault for fault in related if not at_fault.intersection(fault.keys)]
    return without_followers(faults, user_set)


def relation_faults(
    config: BaseConfig,
    user_set: frozenset[str] = frozenset(),
    *,
    names_are_open: bool = False,
    roles: Roles | None = None,
) -> Iterator[Fault]:
    """The contradictions between options, whatever machine this is."""
    yield from both_sizes_faults(config, user_set)
    yield from required_faults(config)
    if isinstance(config, PPOConfig):
        for rule in PPO_RULES:
            yield from rule(config, roles or Roles.of(config))
        yield from rollout_faults(config)
        yield from async_faults(config)
        yield from loader_faults(config)
        yield from distillation_faults(config)
        yield from component_faults(config)
        yield from algorithm_faults(config, names_are_open=names_are_open)
    elif isinstance(config, SFTConfig | SFTEngineConfig):
        yield from sft_faults(config)


def validate_config(
    config: DictConfig | PPOConfig, use_reference_policy: bool, use_critic: bool
) -> None:
    """Raise a ValueError that lists every contradiction of an RL configuration.

    For programs with a `main` of their own: whether files and packages are on this machine is not
    looked at, and names may be registered by the caller.
    """
    loaded = load_config(config, PPOConfig, keeps_unknown=True)
    faults = validate(
        loaded.config,
        loaded.user_set,
        known_faults=loaded.faults,
        names_are_open=True,
        roles=Roles(has_critic=use_critic, has_reference=use_reference_policy),
    )
    mistakes = [fault for fault in faults if not fault.is_about_machine]
    if mistakes:
        raise ConfigError(mistakes)


def without_followers(faults: list[Fault], user_set: frozenset[str]) -> list[Fault]:
    """A key that follows another repeats its mistakes; keep what is said about the user's key."""
    said: dict[str, Fault] = {}
    for fault in faults:
        key = fault.keys[0] if fault.keys else ""
        about = fault.text.removeprefix(key)
        if about not in said or (key in user_set and said[about].keys[0] not in user_set):
            said[about] = fault
    return list(said.values())


def both_sizes_faults(config: BaseConfig, user_set: frozenset[str]) -> Iterator[Fault]:
    for path, size in global_sizes(config, user_set, Keys(config)).items():
        today = f"{path}_per_gpu"
        if today in user_set:
            text = (
                f"{path} is {size} and {today} is set too; they say the same in two ways, so "
                f"remove {path}"
            )
            yield Fault(text, (path, today))


def required_faults(config: BaseConfig) -> Iterator[Fault]:
    for path, value in walk_leaves(config):
        if value == "???":
            yield Fault(f"{path} is required; set it with {path}=...", (path,))


def train_batch_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    """Prompts times responses must fall evenly on the ranks."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    ranks, actor = role_ranks(config, "actor_rollout_ref"), config.actor_rollout_ref.actor
    unit, what = ranks, f"the {ranks} ranks"
    if isinstance(actor, McoreActorConfig):
        unit = data_parallel_size(config)
        what = f"the {unit} data-parallel ranks"
        if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu:
            unit *= actor.ppo_micro_batch_size_per_gpu
            what += f" times their micro-batch of {actor.ppo_micro_batch_size_per_gpu}"
    if prompts * n % unit:
        choices = nearest_multiples(prompts, of=unit // gcd(unit, n))
        text = (
            f"data.train_batch_size ({prompts}) times actor_rollout_ref.rollout.n ({n}) is "
            f"{prompts * n} sequences, which {what} cannot share evenly; the nearest batch sizes "
            f"would be {choices}"
        )
        yield Fault(text, ("data.train_batch_size", "actor_rollout_ref.rollout.n"))


def mini_batch_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    """Mini-batches cut the batch evenly and fall evenly on the data-parallel ranks."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    trained: list[tuple[str, str, Any]] = [
        ("actor_rollout_ref", ACTOR, config.actor_rollout_ref.actor)
    ]
    if roles.has_critic:
        trained.append(("critic", "critic", config.critic))  # pyright: ignore[reportArgumentType]
    for role, path, section in trained:
        mini = section.ppo_mini_batch_size
        key = f"{path}.ppo_mini_batch_size"
        if prompts and prompts % mini:
            text = (
                f"{key} ({mini}) must divide data.train_batch_size ({prompts}); "
                f"the nearest would be {nearest_divisors(mini, of=prompts)}"
            )
            yield Fault(text, (key, "data.train_batch_size"))
            continue
        ranks = data_parallel_size(config, role)
        if mini * n % ranks:
            text = (
                f"{key} ({mini}) times actor_rollout_ref.rollout.n ({n}) is {mini * n} sequences, "
                f"which {ranks} data-parallel ranks cannot share evenly; the nearest would be "
                f"{nearest_multiples(mini, of=ranks // gcd(ranks, n))}"
            )
            yield Fault(text, (key, "actor_rollout_ref.rollout.n"))


def micro_batch_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    """Each role that runs needs a size, or a token budget that holds the longest sequence."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    for section, path, size, switch, budget in micro_batch_settings(config, roles):
        if not section[switch]:
            if section[size] is None:
                text = (
                    f"{path}.{size} is null; set it to the number of sequences per forward pass "
                    f"on one GPU, or set {path}.{switch}=True"
                )
                yield Fault(text, (f"{path}.{size}",))
            continue
        role = "critic" if path == "critic" else "actor_rollout_ref"
        engine = engine_of(config, role)
        sharing = ranks_per_sequence(engine) if isinstance(engine, FSDPEngineConfig) else 1
        if section[budget] * sharing < longest:
            text = (
                f"{path}.{budget} is {section[budget]}; the longest sequence has {longest} tokens "
                f"(data.max_prompt_length + data.max_response_length), so it must be at least "
                f"{-(-longest // sharing)}"
            )
            yield Fault(text, (f"{path}.{budget}",))


def micro_batch_settings(
    config: PPOConfig, roles: Roles
) -> Iterator[tuple[Any, str, str, str, str]]:
    """Section, path and the names of size, switch and budget, for each pass that the run makes."""
    tri = config.actor_rollout_ref
    training = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
    scoring = (
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
    )
    yield tri.actor, ACTOR, *training
    yield tri.rollout, "actor_rollout_ref.rollout", *scoring
    if roles.has_reference or config.distillation.enabled:
        yield tri.ref, "actor_rollout_ref.ref", *scoring
    if roles.has_critic:
        yield config.critic, "critic", *training


def parallel_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    """Ranks that share a sequence must divide the ranks of their role."""
    trained = [("actor_rollout_ref", ACTOR)]
    if roles.has_critic:
        trained.append(("critic", "critic"))
    for role, path in trained:
        ranks, engine = role_ranks(config, role), engine_of(config, role)
        sharing = ranks_per_sequence(engine)
        is_fsdp = isinstance(engine, FSDPEngineConfig)
        name = "ulysses_sequence_parallel_size" if is_fsdp else "megatron"
        if ranks % sharing:
            how = "is" if is_fsdp else "(tensor x pipeline x context) spreads a model over"
            text = (
                f"{path}.{name} {how} {sharing}; that must divide the {ranks} ranks of the role; "
                f"the nearest would be {nearest_divisors(sharing, of=ranks)}"
            )
            yield Fault(text, (f"{path}.{name}",))
        model = config.actor_rollout_ref.model if role != "critic" else config.critic.model
        if is_fsdp and sharing > 1 and not model.use_remove_padding:
            where = "critic.model" if role == "critic" else "actor_rollout_ref.model"
            text = (
                f"{path}.{name} is {sharing}; sequence parallelism works on packed sequences, "
                f"so set {where}.use_remove_padding=True"
            )
            yield Fault(text, (f"{path}.{name}", f"{where}.use_remove_padding"))


def sharding_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    """What ranks that share the training of a model cannot do with parts of it."""
    trained = [("actor_rollout_ref", ACTOR)]
    if roles.has_critic:
        trained.append(("critic", "critic"))
    for role, path in trained:
        section = config.critic if role == "critic" else config.actor_rollout_ref.actor
        ranks, engine = role_ranks(config, role), engine_of(config, role)
        if ranks == 1:
            continue
        optimizer, key = section.optim.optimizer, f"{path}.optim.optimizer"
        if optimizer in LOOK_AT_SHAPES:
            text = (
                f"{key} is {optimizer}, which looks at whole matrices, but the {ranks} ranks of "
                "the role shard the optimizer's state and hold parts of them; use AdamW or "
                "another element-wise optimizer"
            )
            yield Fault(text, (key,))
        if not isinstance(engine, FSDPEngineConfig) or engine.sharding != "full":
            continue
        where = "critic.model.fsdp_config" if role == "critic" else f"{path}.fsdp_config"
        if engine.fsdp_size > 0 and ranks % engine.fsdp_size:
            text = (
                f"{where}.fsdp_size is {engine.fsdp_size}, but {ranks} ranks cannot hold whole "
                f"copies of the weights then; it must divide {ranks}, or be -1 for one copy"
            )
            yield Fault(text, (f"{where}.fsdp_size",))
        model = config.critic.model if role == "critic" else config.actor_rollout_ref.model
        if model.enable_activation_offload:
            key = f"{'critic' if role == 'critic' else 'actor_rollout_ref'}.model"
            text = (
                f"{key}.enable_activation_offload is True, but where weights are gathered for a "
                "layer they would be moved with its activations; use "
                f"{key}.enable_gradient_checkpointing=True instead"
            )
            yield Fault(text, (f"{key}.enable_activation_offload",))


def placement_faults(config: PPOConfig, roles: Roles) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.controller == "local" and trainer.nnodes > 1:
        text = (
            f'trainer.controller is "local"; one process cannot reach trainer.nnodes='
            f"{trainer.nnodes} machines: use trainer.controller=ray"
        )
        yield Fault(text, ("trainer.controller", "trainer.nnodes"))
    if config.transfer_queue.enable and trainer.controller == "local" and world_size(config) > 1:
        text = (
            f"transfer_queue.enable is True, but the {world_size(config)} ranks of "
            "trainer.controller=local are processes that share no store; use "
            "trainer.controller=ray, or leave transfer_queue.enable out"
        )
        yield Fault(text, ("transfer_queue.enable", "trainer.controller"))
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        text = (
            f"trainer.resume_from_path is {shown(trainer.resume_from_path)}; with "
            "trainer.resume_mode=resume_path it must name a folder .../global_step_N"
        )
        yield Fault(text, ("trainer.resume_from_path",))
    model = config.reward_model
    if model.enable and model.enable_resource_pool and not model.nnodes * model.n_gpus_per_node:
        text = (
            f"reward_model.nnodes ({model.nnodes}) times reward_model.n_gpus_per_node "
            f"({model.n_gpus_per_node}) leaves the reward model's pool empty; set both to at least "
            "1, or reward_model.enable_resource_pool=False"
        )
        yield Fault(text, ("reward_model.nnodes",))
    yield from pool_faults(config)


def pool_faults(config: PPOConfig) -> Iterator[Fault]:
    """`resource_pool.<role>.devices` name existing devices, each for one role."""
    total = world_size(config)
    owner: dict[int, str] = {}
    for role in config.resource_pool:
        key = f"resource_pool.{role}.devices"
        if role not in POOL_ROLES:
            text = f"resource_pool has the role {shown(role)}; roles are: "
            yield Fault(text + did_you_mean(role, POOL_ROLES), (key,))
            continue
        devices = pool_devices(config, role)
        if devices is None or not all(isinstance(device, int) for device in devices):
            text = f"resource_pool.{role} must have a list of devices, as {key}=[0,1]"
            yield Fault(text, (key,))
            continue
        beyond = [device for device in devices if not 0 <= device < total]
        if beyond:
            text = (
                f"{key} is {devices}; the run has devices 0 to {total - 1} (trainer.nnodes times "
                f"trainer.n_gpus_per_node), so there is no {beyond[0]}"
            )
            yield Fault(text, (key,))
        shared = sorted({owner[device] for device in devices if device in owner})
        if shared:
            text = (
                f"{key} is {devices}; some of these belong to {', '.join(shared)} already. Give "
                "each role devices of its own, or leave both out to share all"
            )
            yield Fault(text, (key,))
        owner.update(dict.fromkeys(devices, f"resource_pool.{role}"))


def sft_faults(config: SFTConfig | SFTEngineConfig) -> Iterator[Fault]:
    data = config.data
    sharing, every = sequence_ranks(config), world_size(config)
    is_engine = isinstance(config, SFTEngineConfig)
    megatron = config.engine if is_engine and isinstance(config.engine, McoreEngineConfig) else None
    if every % sharing and megatron is None:  # a layout is checked with its model
        key = f"{'engine.' if is_engine else ''}ulysses_sequence_parallel_size"
        text = f"{key} is {sharing}; it must divide the {every} ranks that the run is started on"
        yield Fault(text, (key,), is_about_machine=True)
    ranks = max(1, every // sharing)
    if data.train_batch_size % ranks:
        text = (
            f"data.train_batch_size is {data.train_batch_size}; it must be a multiple of the "
            f"{ranks} ranks: {nearest_multiples(data.train_batch_size, of=ranks)}"
        )
        yield Fault(text, ("data.train_batch_size",))
    is_by_tokens = isinstance(data, SFTEngineDataConfig) and data.use_dynamic_bsz
    budget = data.max_token_len_per_gpu if is_by_tokens else 0
    if megatron is not None:
        budget *= megatron.context_parallel_size
    if is_by_tokens and budget < data.max_length:
        text = (
            f"data.max_token_len_per_gpu is {data.max_token_len_per_gpu}; the longest row has "
            f"data.max_length={data.max_length} tokens, so it must be at least that"
        )
        yield Fault(text, ("data.max_token_len_per_gpu",))


PPO_RULES: list[Callable[[PPOConfig, Roles], Iterator[Fault]]] = [
    train_batch_faults,
    mini_batch_faults,
    micro_batch_faults,
    parallel_faults,
    sharding_faults,
    placement_faults,
]


def advice(config: Any) -> list[str]:
    return list(sentences(config))


def sentences(config: Any) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    estimator = config.algorithm.adv_estimator
    if rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to a prompt with each "
            "other, but actor_rollout_ref.rollout.n is 1: set it to 8, say"
        )
    if config.algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "the KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward) and "
            "in the loss (actor_rollout_ref.actor.use_kl_loss)"
        )
    plan = plan_of(config)
    if actor.use_kl_loss and plan is not None and not plan.is_on_policy:
        yield (
            f"{ACTOR}.use_kl_loss is True, and tokens are up to {plan.max_staleness} steps old: "
            "this KL has no importance weight, so over tokens of older policies it is off by as "
            "much as the policies differ. In the reward (algorithm.use_kl_in_reward=True instead) "
            "it is weighted as the policy loss is"
        )
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        yield (
            f"validation draws {rollout.val_kwargs.n} responses per prompt, all of them the same: "
            "set actor_rollout_ref.rollout.val_kwargs.do_sample=True and a temperature"
        )
    for key in unchecked_engine_arguments(config):
        yield f"{key} is passed on; whether the engine takes it shows when it starts"
    if config.trainer.save_freq < 1 and (config.trainer.total_training_steps or 2) > 1:
        yield "no checkpoint is saved: trainer.save_freq is not positive"


def loader_faults(config: Any) -> Iterator[Fault]:
    data = config.data
    pairs = (
        ("data.custom_cls", data.custom_cls.path, "name", data.custom_cls.name),
        ("data.datagen", data.datagen.path, "name", data.datagen.name),
        ("data.sampler", data.sampler.class_path, "class_name", data.sampler.class_name),
    )
    for key, path, field, name in pairs:
        if path is not None and name is None:
            text = f"{key}.{field} is null; it must name the class in {path}"
            yield Fault(text, (f"{key}.{field}",))
    manager = config.reward_manager
    if manager.source == "importlib" and (manager.module is None or manager.module.path is None):
        text = "reward_manager.module.path is null; reward_manager.source=importlib needs the file"
        yield Fault(text, ("reward_manager.module.path",))
    if manager.name == "model" and manager.source == "register" and not config.reward_model.enable:
        text = (
            "reward_manager.name is model, but reward_model.enable is False; it takes the score of "
            "a reward model: set reward_model.enable=True and reward_model.model.path"
        )
        yield Fault(text, ("reward_manager.name", "reward_model.enable"))
    if config.reward_model.enable and not runs_prime(config):
        yield from reward_model_faults(config)


def reward_model_faults(config: PPOConfig) -> Iterator[Fault]:
    """A manager beside a frozen model must have something to do, and nothing that it ignores."""
    manager, function = config.reward_manager, config.custom_reward_function.path
    keys = ("reward_manager.name", "custom_reward_function.path")
    if manager.name == "model" and function is not None:
        text = (
            "reward_manager.name is 'model' and custom_reward_function.path is set; that manager "
            "asks no function: remove one of the two"
        )
        yield Fault(text, keys)
    is_built_in = manager.source == "register" and manager.name in MANAGERS_THAT_ASK_A_FUNCTION
    if is_built_in and function is None:
        text = (
            f"reward_manager.name is {manager.name!r} and reward_model.enable is True; without a "
            "custom_reward_function the model's score is the reward and that manager would do "
            "nothing: set reward_manager.name=naive, or give it a function, which finds the "
            'model\'s score in extra_info["rm_score"]'
        )
        yield Fault(text, keys)
