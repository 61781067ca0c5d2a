"""Checks of the parts of a configuration: the algorithm and generation.

They are about relations that hold on every machine; `validate_machine` is about this one.
"""

from collections.abc import Iterator
from typing import Any

from verl.config.correction import CHOICES, correction_of
from verl.config.effects import value_at
from verl.config.faults import Fault, nearest_divisors, shown
from verl.config.roles import (
    AGENT_LOOPS,
    ESTIMATORS,
    POLICY_LOSSES,
    RECIPES,
    ROLLOUTS,
    STRATEGIES,
    TRACKERS,
    async_mode,
    did_you_mean,
    engine_of,
    has_own_loops,
    may_register_names,
    needs_critic,
    pool_devices,
    role_ranks,
    rollout_ranks,
    rollout_traits,
    uses_lora,
    world_size,
)
from verl.config.validate_recipes import (
    pair_faults,
    preference_faults,
    prime_faults,
    sequence_loss_faults,
)

REJECTION_CRITERIA = (
    *(
        f"{level}_{kind}"
        for level in ("token", "seq_sum", "seq_mean")
        for kind in ("k1", "k2", "k3")
    ),
    "seq_max_k2",
    "seq_max_k3",
)
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
RETURNS_ROUTES = ("native", "native_process", "vllm")
"""Engines whose outputs say which experts each token used."""

ROLLOUT = "actor_rollout_ref.rollout"


def algorithm_faults(config: Any, *, names_are_open: bool) -> Iterator[Fault]:
    if not names_are_open and not may_register_names(config):
        yield from name_faults(config)
    if not names_are_open and not has_own_loops(config, config):
        yield from loop_faults(config)
    yield from closed_name_faults(config)
    yield from estimator_faults(config)
    yield from correction_faults(config)
    yield from sequence_loss_faults(config)
    yield from pair_faults(config)
    yield from replay_faults(config)
    yield from preference_faults(config)
    yield from prime_faults(config)


def loop_faults(config: Any) -> Iterator[Fault]:
    """The agent loop must be built in, unless user code may have registered it."""
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    name = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if name not in AGENT_LOOPS:
        text = (
            f"{key} is {shown(name)}; it must be one of: {did_you_mean(name, AGENT_LOOPS)}. A loop "
            "of your own is listed in actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )
        yield Fault(text, (key,))


def name_faults(config: Any) -> Iterator[Fault]:
    """Estimator, loss and engine must be built in, unless user code may have registered them."""
    names = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATORS),
        (LOSS_KEY, config.actor_rollout_ref.actor.policy_loss.loss_mode, POLICY_LOSSES),
        ("actor_rollout_ref.rollout.name", config.actor_rollout_ref.rollout.name, ROLLOUTS),
        ("trainer.recipe", config.trainer.recipe, RECIPES),
    )
    for key, name, known in names:
        if name is not None and name not in known:
            text = (
                f"{key} is {shown(name)}; it must be one of: {did_you_mean(name, known)}. A name "
                "of your own is registered by a module in actor_rollout_ref.model.external_lib"
            )
            yield Fault(text, (key,))


def closed_name_faults(config: Any) -> Iterator[Fault]:
    """Names that nobody can add to."""
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in STRATEGIES:
        key = "actor_rollout_ref.actor.strategy"
        text = (
            f"{key} is {shown(strategy)}; it must be one of: {did_you_mean(strategy, STRATEGIES)}"
        )
        yield Fault(text, (key,))
    critic = config.critic.strategy
    if needs_critic(config) and (critic == "megatron") != (strategy == "megatron"):
        text = (
            f"critic.strategy is {shown(critic)}; either both of critic and actor use megatron or "
            f"none, and actor_rollout_ref.actor.strategy is {shown(strategy)}"
        )
        yield Fault(text, ("critic.strategy",))
    for tracker in config.trainer.logger:
        if tracker not in TRACKERS:
            known = did_you_mean(tracker, TRACKERS)
            text = f"trainer.logger has {shown(tracker)}; trackers are: {known}"
            yield Fault(text, ("trainer.logger",))


def estimator_faults(config: Any) -> Iterator[Fault]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator == "gae" and config.critic.enable is False:
        text = (
            "critic.enable is False, but algorithm.adv_estimator=gae needs a critic; "
            "use algorithm.adv_estimator=grpo (or another without critic), or remove critic.enable"
        )
        yield Fault(text, ("critic.enable", "algorithm.adv_estimator"))
    if config.algorithm.use_pf_ppo and estimator in ESTIMATORS and estimator != "gae":
        text = (
            f"algorithm.use_pf_ppo is True, but algorithm.adv_estimator is {shown(estimator)}; "
            "only gae draws the batch again: set one of them the other way"
        )
        yield Fault(text, ("algorithm.use_pf_ppo", "algorithm.adv_estimator"))
    if config.algorithm.use_pf_ppo and config.transfer_queue.enable:
        text = (
            "algorithm.use_pf_ppo draws the rows of a batch anew, which transfer_queue.enable "
            "does not do yet; leave one of them out"
        )
        yield Fault(text, ("algorithm.use_pf_ppo", "transfer_queue.enable"))
    if config.trainer.recipe == "pf_ppo":
        yield from old_response_faults(config)
    if estimator == "grpo_passk" and n < 2:
        text = (
            f"actor_rollout_ref.rollout.n is {n}; algorithm.adv_estimator=grpo_passk compares the "
            "two best responses to a prompt, so it must be at least 2"
        )
        yield Fault(text, ("actor_rollout_ref.rollout.n",))
    sums = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    if (estimator or "").endswith("optimal_token_baseline") and not sums:
        key = "actor_rollout_ref.actor.calculate_sum_pi_squared"
        text = f"{key} is False; algorithm.adv_estimator={estimator} needs it: set it to True"
        yield Fault(text, (key,))
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric is None:
        text = (
            "algorithm.filter_groups.metric is null; with algorithm.filter_groups.enable=True it "
            "must say what has to differ: acc, score, seq_reward or seq_final_reward"
        )
        yield Fault(text, ("algorithm.filter_groups.metric",))
    if groups.enable and groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        text = (
            "algorithm.filter_groups.metric is seq_final_reward, but the KL of "
            "algorithm.use_kl_in_reward is charged after prompts are chosen; use seq_reward"
        )
        yield Fault(text, ("algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"))


def other_weights_faults(config: Any) -> Iterator[Fault]:
    """Exact generation needs the weights that are trained, whole, or a copy of them."""
    section, key = config.actor_rollout_ref, f"{ROLLOUT}.exact"
    engine, adapters = engine_of(config, "actor_rollout_ref"), uses_lora(config)
    is_full = role_ranks(config, "actor_rollout_ref") > 1 and engine.get("sharding") == "full"
    others = {
        f"{ROLLOUT}.tensor_model_parallel_size": section.rollout.tensor_model_parallel_size > 1,
        "actor_rollout_ref.actor.fsdp_config.sharding": is_full,
        "actor_rollout_ref.actor.strategy": section.actor.strategy == "megatron",
        "actor_rollout_ref.model.lora.merge": adapters and section.model.lora.merge,
        f"{ROLLOUT}.name": adapters and section.rollout.name == "native_process",
    }
    for other in (other for other, is_on in others.items() if is_on and section.rollout.exact):
        text = (
            f"{key} is True, and {other} is {value_at(config, other)}; then the rollout engine has "
            "other weights than those that are trained: shards of them, or with adapters merged "
            f"into them. Change that, or set {key}=False"
        )
        yield Fault(text, (key, other))
    sharing = engine.get("ulysses_sequence_parallel_size", 1)
    if section.rollout.exact and sharing > 1:
        other = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
        text = (
            f"{key} is True, and {other} is {sharing}; an exact model computes every product in "
            f"one shape, and ranks that share a sequence have parts of it: set {other}=1 or "
            f"{key}=False"
        )
        yield Fault(text, (key, other))


def number_format_faults(config: Any) -> Iterator[Fault]:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.quantization"
    if rollout.quantization is None and rollout.kv_cache_dtype == "auto":
        return
    if rollout.exact:
        text = (
            f"{ROLLOUT}.exact is True, quantization is {rollout.quantization} and kv_cache_dtype "
            f"is {rollout.kv_cache_dtype}; rounded numbers are not those of training: set "
            "exact=False, or leave the others out"
        )
        yield Fault(text, (key, f"{ROLLOUT}.exact"))
    if rollout.name == "hf" and rollout.quantization is not None:
        text = f"{key} is {rollout.quantization}, and rollout.name is hf, which has no such layers"
        yield Fault(f"{text}: set rollout.name=native", (key, f"{ROLLOUT}.name"))


def number_format_notices(config: Any) -> list[str]:
    """Said at the start: what the sampling policy differs by, and what corrects for it."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    is_corrected = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    has_own_format = rollout.quantization is not None or rollout.kv_cache_dtype != "auto"
    if not has_own_format or is_corrected:
        return []
    return [
        f"{ROLLOUT}.quantization is {rollout.quantization}, kv_cache_dtype is "
        f"{rollout.kv_cache_dtype}: tokens are sampled by a policy that "
        "differs from the trained one, and nothing corrects for it; "
        "algorithm.rollout_correction.rollout_is=token weighs them "
        "(training/rollout_probs_diff_mean shows the difference)"
    ]


def replay_faults(config: Any) -> Iterator[Fault]:
    """Routes that are replayed must have been recorded, by the old policy or by the engine."""
    section, key = config.actor_rollout_ref, "actor_rollout_ref.actor.router_replay.mode"
    mode, rollout = section.actor.router_replay.mode, section.rollout
    skips = {
        "algorithm.rollout_correction.bypass_mode": config.algorithm.rollout_correction.bypass_mode,
        f"{ROLLOUT}.exact": rollout.exact,
        "actor_rollout_ref.actor.use_rollout_log_probs": section.actor.use_rollout_log_probs,
    }
    for other in (name for name, is_on in skips.items() if is_on and mode == "R2"):
        text = (
            f"{key} is R2, and {other} is True; then no pass of the old policy records routes: "
            f"set {other}=False, or mode=R3"
        )
        yield Fault(text, (key, other))
    engine = engine_of(config, "actor_rollout_ref")
    if mode != "disabled" and section.actor.strategy == "megatron":
        text = (
            f"{key} is {mode}, but routers of strategy=megatron choose by themselves: set it to "
            "disabled, or use strategy=fsdp"
        )
        yield Fault(text, (key,))
    ranks = engine.get("ulysses_sequence_parallel_size", 1)
    if mode == "R2" and ranks > 1:
        text = (
            f"{key} is R2, and ulysses_sequence_parallel_size is {ranks}; routes are recorded "
            "where a rank has whole rows: set it to 1, or mode=R3"
        )
        yield Fault(text, (key,))
    if mode == "R3" and async_mode(config) != "sync":
        text = (
            f"{key} is R3, and async_training.mode is {async_mode(config)}; routes are not stored "
            "with rows that go on across updates: set it to sync, or mode=R2"
        )
        yield Fault(text, (key,))
    if mode == "R3" and not rollout.enable_rollout_routing_replay:
        switch = f"{ROLLOUT}.enable_rollout_routing_replay"
        yield Fault(
            f"{key} is R3, which replays what the engine returns: set {switch}=True", (key,)
        )
    if mode == "R3" and rollout.name not in RETURNS_ROUTES:
        text = (
            f"{key} is R3, but rollout.name is {rollout.name}, which returns no routes; those that "
            f"do: {', '.join(RETURNS_ROUTES)}. R2 replays the routes of the old policy instead"
        )
        yield Fault(text, (key, f"{ROLLOUT}.name"))
    needed = {"enable_prefix_caching": True, "pipeline_model_parallel_size": 1}
    for name in needed if mode == "R3" and rollout.name == "vllm" else ():
        if getattr(rollout, name) != needed[name]:
            text = (
                f"{key} is R3, and {ROLLOUT}.{name} is {getattr(rollout, name)}; vLLM keeps routes "
                "with the blocks of its prefix cache, on workers that have all layers: set it to "
                f"{needed[name]}, or mode=R2"
            )
            yield Fault(text, (key, f"{ROLLOUT}.{name}"))


def old_response_faults(config: Any) -> Iterator[Fault]:
    """Responses of earlier steps are drawn by PF-PPO, and need a correction as other old ones."""
    size, key = config.algorithm.pf_ppo.replay_size, "algorithm.pf_ppo.replay_size"
    if not config.algorithm.use_pf_ppo or not size:
        text = (
            f"trainer.recipe is pf_ppo, but algorithm.use_pf_ppo is {config.algorithm.use_pf_ppo} "
            f"and {key} is {size}; the recipe draws from a replay buffer: set use_pf_ppo=True and "
            "a size above 0, or start verl.trainer.main_ppo"
        )
        yield Fault(text, (key, "algorithm.use_pf_ppo"))
    elif correction_of(config) is None:
        text = (
            f"{key} is {size}, so tokens of older policies are trained on, and no correction for "
            f"them is chosen; choose one of:\n{CHOICES}"
        )
        yield Fault(text, (key, "algorithm.rollout_correction.rollout_is"))


def correction_faults(config: Any) -> Iterator[Fault]:
    correction = config.algorithm.rollout_correction
    path = "algorithm.rollout_correction"
    rollout = config.actor_rollout_ref.rollout
    is_on = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    always_given = rollout_traits(rollout.name).is_builtin
    if is_on and not rollout.calculate_log_probs and not always_given:
        key = "actor_rollout_ref.rollout.calculate_log_probs"
        text = f"{key} is False; {path} compares with the rollout's log-probs, so set it to True"
        yield Fault(text, (key,))
    if rollout.exact and rollout.kv_after_update == "keep":
        key = "actor_rollout_ref.rollout.kv_after_update"
        yield Fault(
            f"{key} is keep, and actor_rollout_ref.rollout.exact is True; tokens drawn over keys "
            "and values of older weights do not have the log-probabilities of training: set "
            "kv_after_update=recompute or exact=False",
            (key,),
        )
    if rollout.exact and rollout.name not in ("native", "native_process"):
        key = "actor_rollout_ref.rollout.exact"
        text = (
            f'{key} is True, but rollout.name is "{rollout.name}"; only the built-in engine shares '
            "the trainer's arithmetic: set rollout.name=native or rollout.exact=False"
        )
        yield Fault(text, (key, "actor_rollout_ref.rollout.name"))
    yield from other_weights_faults(config)
    yield from number_format_faults(config)
    criteria = [name.strip() for name in (correction.rollout_rs or "").split(",") if name.strip()]
    for name in criteria:
        if name not in REJECTION_CRITERIA:
            known = did_you_mean(name, REJECTION_CRITERIA)
            text = f"{path}.rollout_rs has {shown(name)}; criteria are: {known}"
            yield Fault(text, (f"{path}.rollout_rs",))
    bounds = correction.rollout_rs_threshold
    count = len(str(bounds).split(",")) if bounds is not None else 0
    if criteria and count not in (1, len(criteria)):
        text = (
            f"{path}.rollout_rs_threshold is {shown(bounds)}; it must have one bound for all, or "
            f"one for each of the {len(criteria)} criteria of rollout_rs, separated by commas"
        )
        yield Fault(text, (f"{path}.rollout_rs_threshold",))


def rollout_faults(config: Any) -> Iterator[Fault]:
    yield from sampling_faults(config)
    yield from length_faults(config)
    yield from own_ranks_faults(config)
    if rollout_ranks(config):
        yield from engine_faults(config)


def sampling_faults(config: Any) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        key = "temperature" if rollout.temperature == 0 else "do_sample"
        text = (
            f"{ROLLOUT}.{key} is {rollout[key]}; all {rollout.n} responses to a prompt would be "
            f"the same, so sample (temperature above 0, do_sample=True) or set {ROLLOUT}.n=1"
        )
        yield Fault(text, (f"{ROLLOUT}.{key}", f"{ROLLOUT}.n"))
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        text = (
            f"{ROLLOUT}.val_kwargs.temperature is 0; with {ROLLOUT}.val_kwargs.do_sample=True it "
            "must be above 0; for greedy validation set do_sample=False"
        )
        yield Fault(text, (f"{ROLLOUT}.val_kwargs.temperature",))


def length_faults(config: Any) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        text = (
            f"{ROLLOUT}.max_model_len is {rollout.max_model_len}; it must hold the longest prompt "
            f"and response, {longest} tokens; null takes exactly that"
        )
        yield Fault(text, (f"{ROLLOUT}.max_model_len",))
    budget = rollout.max_num_batched_tokens
    if rollout.name == "vllm" and not rollout.enable_chunked_prefill and budget < longest:
        text = (
            f"{ROLLOUT}.max_num_batched_tokens is {budget}; without enable_chunked_prefill it must "
            f"hold the longest sequence, {longest} tokens"
        )
        yield Fault(text, (f"{ROLLOUT}.max_num_batched_tokens",))


def own_ranks_faults(config: Any) -> Iterator[Fault]:
    """Generation shares the policy's ranks, or has its own: one of the two."""
    section, switch = config.actor_rollout_ref, "actor_rollout_ref.hybrid_engine"
    devices = pool_devices(config, "rollout")
    if section.hybrid_engine:
        if devices is not None:
            text = (
                f"resource_pool.rollout.devices is {devices}; with {switch}=True generation shares "
                f"the devices of training: set {switch}=False"
            )
            yield Fault(text, ("resource_pool.rollout.devices",))
        return
    if devices is None and not section.rollout.nnodes:
        text = (
            f"{switch} is False, so generation needs ranks of its own: set {ROLLOUT}.nnodes and "
            f"n_gpus_per_node for devices beside those of the trainer, or "
            f"resource_pool.rollout.devices for some of its {world_size(config)}"
        )
        yield Fault(text, (switch,))
    if devices is not None and section.rollout.nnodes:
        text = (
            f"{ROLLOUT}.nnodes is {section.rollout.nnodes} and resource_pool.rollout.devices is "
            f"{devices}; leave one of them out"
        )
        yield Fault(text, (f"{ROLLOUT}.nnodes", "resource_pool.rollout.devices"))
    if devices is not None and pool_devices(config, "actor_rollout_ref") is None:
        text = (
            f"resource_pool.rollout.devices is {devices}, and the actor has no list; without one "
            "it takes all devices, these too: set resource_pool.actor_rollout_ref.devices"
        )
        yield Fault(text, ("resource_pool.rollout.devices",))


def engine_faults(config: Any) -> Iterator[Fault]:
    yield from engine_size_faults(config)
    rollout = config.actor_rollout_ref.rollout
    ranks = rollout_ranks(config)
    tensor, data = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    size = tensor * data * rollout.pipeline_model_parallel_size
    if ranks % size:
        text = (
            f"{ROLLOUT}.tensor_model_parallel_size ({tensor}) times data_parallel_size ({data}) "
            f"times pipeline_model_parallel_size makes engines of {size} devices; that must divide "
            f"the {ranks} ranks; the nearest would be {nearest_divisors(size, of=ranks)}"
        )
        yield Fault(text, (f"{ROLLOUT}.tensor_model_parallel_size",))
    if rollout.expert_parallel_size not in (1, tensor * data):
        text = (
            f"{ROLLOUT}.expert_parallel_size is {rollout.expert_parallel_size}; it must be 1 or "
            f"tensor_model_parallel_size times data_parallel_size ({tensor * data})"
        )
        yield Fault(text, (f"{ROLLOUT}.expert_parallel_size",))


def engine_size_faults(config: Any) -> Iterator[Fault]:
    """Refuse parallel sizes that the engine does not support."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    is_divisible = rollout_traits(rollout.name).is_divisible
    if not is_divisible and rollout.tensor_model_parallel_size > 1:
        text = (
            f'{key} is {rollout.tensor_model_parallel_size}, but {ROLLOUT}.name is "{rollout.name}"'
            "; of the built-in engines only native divides its model among ranks: set one of them "
            "the other way"
        )
        yield Fault(text, (key, f"{ROLLOUT}.name"))
