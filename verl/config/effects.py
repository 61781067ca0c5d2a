"""Options that were set and do nothing, with the reason.

Before a run, `without_effect` says which of the user's settings cannot matter in this plan: a
critic that is not there, a coefficient whose switch is off. After a run, `unread` says which ones
nothing looked at. Neither is an error; both are what a user wants to know before trusting a result.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, ReadLog
from verl.config.keys import Keys
from verl.config.names import (
    critic_lora_rank,
    is_own_reference,
    needs_critic,
    needs_reference,
    uses_lora,
)
from verl.config.ppo import PPOConfig
from verl.config.ranks import engine_of, ranks_per_sequence
from verl.config.variants import family

TRI = "actor_rollout_ref"
ACTOR = f"{TRI}.actor"
ROLLOUT = f"{TRI}.rollout"
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([\w.]+)")
COMPATIBILITY = "accepted for older scripts; nothing reads it"
ALWAYS_PACKED = "rows are always packed without padding; the numbers are those of padded rows"
REWARD_MODEL_KEYS = (
    "model",
    "rollout",
    "enable_resource_pool",
    "n_gpus_per_node",
    "nnodes",
    "micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "max_length",
    "truncation",
)
"""What only a reward model reads."""


ADAPTER_FORM = tuple(
    f"{TRI}.model.{name}"
    for name in ("lora_alpha", "use_rslora", "target_modules", "exclude_modules")
)
"""What new adapters look like."""


@dataclass(frozen=True)
class Effect:
    """While `is_idle`, the keys below `prefixes` do nothing, because of `reason`."""

    prefixes: tuple[str, ...]
    reason: str
    is_idle: Callable[[Any], bool]

    def covers(self, key: str) -> bool:
        if key.endswith(".enable"):  # a switch is what makes others idle
            return False
        return any(key == prefix or key.startswith(f"{prefix}.") for prefix in self.prefixes)


def loss_mode(config: Any) -> str:
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def engine_is_not(name: str) -> Callable[[Any], bool]:
    return lambda config: config.actor_rollout_ref.rollout.name != name


EFFECTS: list[Effect] = [
    Effect(
        ("critic", "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"),
        "there is no critic: algorithm.adv_estimator does not use one",
        lambda config: not needs_critic(config),
    ),
    Effect(
        (f"{TRI}.ref",),
        "there is no reference policy: neither actor.use_kl_loss nor algorithm.use_kl_in_reward",
        lambda config: not needs_reference(config),
    ),
    Effect(
        ("algorithm.kl_ctrl", "algorithm.kl_penalty"),
        "algorithm.use_kl_in_reward is off",
        lambda config: not config.algorithm.use_kl_in_reward,
    ),
    Effect(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl_ctrl.type is fixed",
        lambda config: config.algorithm.kl_ctrl.type == "fixed",
    ),
    Effect(
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        "actor_rollout_ref.actor.use_kl_loss is off",
        lambda config: not config.actor_rollout_ref.actor.use_kl_loss,
    ),
    Effect(
        ("algorithm.lam",),
        "only algorithm.adv_estimator=gae uses it",
        lambda config: config.algorithm.adv_estimator != "gae",
    ),
    Effect(
        ("algorithm.gamma",),
        "this advantage estimator does not discount",
        lambda config: (
            config.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus", "remax")
            and "optimal_token_baseline" not in config.algorithm.adv_estimator
        ),
    ),
    Effect(
        ("algorithm.norm_adv_by_std_in_grpo",),
        "only the GRPO estimators use it",
        lambda config: not config.algorithm.adv_estimator.startswith("grpo"),
    ),
    Effect(
        ("algorithm.use_pf_ppo", "algorithm.pf_ppo"),
        "only algorithm.adv_estimator=gae resamples the batch",
        lambda config: config.algorithm.adv_estimator != "gae",
    ),
    Effect(
        ("algorithm.pf_ppo",),
        "algorithm.use_pf_ppo is off",
        lambda config: not config.algorithm.use_pf_ppo,
    ),
    Effect(
        ("algorithm.filter_groups",),
        "algorithm.filter_groups.enable is off",
        lambda config: not config.algorithm.filter_groups.enable,
    ),
    Effect(
        ("algorithm.rollout_correction.loss_type",),
        "algorithm.rollout_correction.bypass_mode is off",
        lambda config: not config.algorithm.rollout_correction.bypass_mode,
    ),
    Effect(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        "algorithm.rollout_correction.rollout_is is null",
        lambda config: config.algorithm.rollout_correction.rollout_is is None,
    ),
    Effect(
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        "algorithm.rollout_correction.rollout_rs is null",
        lambda config: config.algorithm.rollout_correction.rollout_rs is None,
    ),
    Effect(
        tuple(f"{ACTOR}.policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")),
        "only policy_loss.loss_mode=clip_cov uses it",
        lambda config: loss_mode(config) != "clip_cov",
    ),
    Effect(
        (f"{ACTOR}.policy_loss.kl_cov_ratio", f"{ACTOR}.policy_loss.ppo_kl_coef"),
        "only policy_loss.loss_mode=kl_cov uses it",
        lambda config: loss_mode(config) != "kl_cov",
    ),
    Effect(
        (f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"),
        "only policy_loss.loss_mode=sapo uses it",
        lambda config: loss_mode(config) != "sapo",
    ),
    Effect(
        (f"{ACTOR}.clip_ratio_c",),
        "only policy_loss.loss_mode=vanilla has a dual clip",
        lambda config: loss_mode(config) != "vanilla",
    ),
    Effect(
        (f"{ACTOR}.loss_scale_factor",),
        "only loss_agg_mode=seq-mean-token-sum-norm uses it",
        lambda config: config.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
    ),
    Effect(
        (f"{ACTOR}.ppo_max_token_len_per_gpu",),
        "actor_rollout_ref.actor.use_dynamic_bsz is off: micro-batches are cut by count",
        lambda config: not config.actor_rollout_ref.actor.use_dynamic_bsz,
    ),
    Effect(
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"),
        "actor_rollout_ref.actor.use_dynamic_bsz is on: micro-batches are cut by tokens",
        lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz,
    ),
    Effect(
        (f"{TRI}.model.use_remove_padding", f"{ACTOR}.use_remove_padding"),
        ALWAYS_PACKED,
        lambda config: ranks_per_sequence(engine_of(config, TRI)) == 1,
    ),
    Effect(
        ("critic.model.use_remove_padding",),
        ALWAYS_PACKED,
        lambda config: ranks_per_sequence(engine_of(config, "critic")) == 1,
    ),
    Effect(("reward_model.model.use_remove_padding",), ALWAYS_PACKED, lambda config: True),
    Effect(
        (
            f"{ACTOR}.use_torch_compile",
            f"{ACTOR}.fsdp_config.use_torch_compile",
            f"{TRI}.ref.use_torch_compile",
            f"{TRI}.ref.fsdp_config.use_torch_compile",
            f"{ACTOR}.probe_micro_batch",
            "critic.probe_micro_batch",
        ),
        "trainer.device is cpu: nothing is compiled there, and memory is not measured",
        lambda config: config.trainer.device == "cpu",
    ),
    Effect(
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k")),
        "validation is greedy: actor_rollout_ref.rollout.val_kwargs.do_sample is off",
        lambda config: not config.actor_rollout_ref.rollout.val_kwargs.do_sample,
    ),
    *(
        Effect(
            (f"{ROLLOUT}.engine_kwargs.{engine}",),
            f"actor_rollout_ref.rollout.name is not {engine}",
            engine_is_not(engine),
        )
        for engine in ("vllm", "sglang", "trtllm")
    ),
    Effect(
        (f"{ROLLOUT}.multi_stage_wake_up",),
        "actor_rollout_ref.rollout.name is not sglang",
        engine_is_not("sglang"),
    ),
    Effect(
        (
            f"{ROLLOUT}.enable_sleep_mode",
            f"{ROLLOUT}.scheduling_policy",
            f"{ROLLOUT}.logprobs_mode",
        ),
        "actor_rollout_ref.rollout.name is not vllm",
        engine_is_not("vllm"),
    ),
    Effect(
        tuple(f"{ROLLOUT}.{name}" for name in ("python", "server", "probe", "canary_tolerance")),
        "the built-in engine runs in the trainer's processes",
        lambda config: config.actor_rollout_ref.rollout.name in ("native", "hf"),
    ),
    Effect(
        (*ADAPTER_FORM, f"{TRI}.model.lora.merge"),
        "no LoRA: actor_rollout_ref.model.lora_rank is 0",
        lambda config: not uses_lora(config),
    ),
    Effect(
        ADAPTER_FORM,
        "the adapter in actor_rollout_ref.model.lora_adapter_path brings its own",
        lambda config: config.actor_rollout_ref.model.lora_adapter_path is not None,
    ),
    Effect(
        (f"{TRI}.ref.fsdp_config", f"{TRI}.ref.megatron"),
        "with LoRA the reference is the actor without its adapters",
        is_own_reference,
    ),
    Effect(
        ("critic.model.lora_alpha", "critic.model.target_modules"),
        "no LoRA: critic.model.lora_rank is 0",
        lambda config: not critic_lora_rank(config),
    ),
    Effect(
        (f"{ROLLOUT}.layered_summon",),
        "whole tensors are always put together one at a time",
        lambda config: True,
    ),
    Effect(
        (f"{ROLLOUT}.load_format",),
        "the built-in engine generates with the trained weights, or with a copy of them",
        lambda config: config.actor_rollout_ref.rollout.name in ("native", "hf", "native_process"),
    ),
    Effect(
        (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"),
        f"{TRI}.hybrid_engine is on: generation shares the devices of training",
        lambda config: config.actor_rollout_ref.hybrid_engine,
    ),
    Effect(
        tuple(f"reward_model.{name}" for name in REWARD_MODEL_KEYS)
        + ("resource_pool.reward_model",),
        "reward_model.enable is off",
        lambda config: not config.reward_model.enable,
    ),
    Effect(
        ("reward_model.forward_max_token_len_per_gpu",),
        "reward_model.use_dynamic_bsz is off: micro-batches are cut by count",
        lambda config: not config.reward_model.use_dynamic_bsz,
    ),
    Effect(
        ("reward_model.micro_batch_size_per_gpu",),
        "reward_model.use_dynamic_bsz is on: micro-batches are cut by tokens",
        lambda config: config.reward_model.use_dynamic_bsz,
    ),
    Effect(
        ("reward_model.truncation",),
        "reward_model.max_length is null: nothing is cut",
        lambda config: config.reward_model.max_length is None,
    ),
    Effect(
        ("reward_model.reward_loop_module_path", "reward_model.reward_loop_class_name"),
        "reward_model.reward_loop_source is register",
        lambda config: config.reward_model.reward_loop_source == "register",
    ),
    Effect(
        ("reward_model.num_workers",),
        "only the reward manager remote uses it; others have reward_model.reward_kwargs",
        lambda config: (
            config.reward_model.reward_loop_source == "register"
            and config.reward_manager.source == "register"
            and config.reward_manager.name != "remote"
        ),
    ),
    Effect(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        "custom_reward_function.path is null: the function registered for the data source is used",
        lambda config: config.custom_reward_function.path is None,
    ),
    Effect(
        ("global_profiler",),
        "global_profiler.steps is null: no step is profiled",
        lambda config: not config.global_profiler.steps,
    ),
    Effect(
        ("trainer.resume_from_path",),
        "trainer.resume_mode is not resume_path",
        lambda config: config.trainer.resume_mode != "resume_path",
    ),
    Effect(
        ("data.dataloader_num_workers",),
        "rows are read when they are needed; only data.sampler looks at it",
        lambda config: config.data.sampler.class_path is None,
    ),
    Effect(
        (
            "data.return_raw_chat",
            "data.chat_template_func",
            "data.filter_prompts",
            "data.project_name",
            "data.experiment_name",
            f"{ACTOR}.fsdp_config.use_orig_params",
            f"{ACTOR}.calculate_entropy",
            f"{ACTOR}.sum_pi_squared_checkpointing",
            f"{ROLLOUT}.multi_turn.use_inference_chat_template",
            f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
            f"{ROLLOUT}.agent.custom_async_server",
            f"{ROLLOUT}.sglang_engine_mode",
            "trainer.balance_batch",
            "trainer.ray_wait_register_center_timeout",
            "trainer.use_legacy_worker_impl",
        ),
        COMPATIBILITY,
        lambda config: True,
    ),
]


def without_effect(config: BaseConfig, user_set: Iterable[str]) -> list[tuple[str, str]]:
    """The user's settings that cannot matter in this plan, each with its reason."""
    if not isinstance(config, PPOConfig):
        return []
    found = dict(reasons(config, user_set))
    return sorted(found.items())


def reasons(config: PPOConfig, user_set: Iterable[str]) -> Iterator[tuple[str, str]]:
    own, every_key = Keys(config), family(PPOConfig).keys
    strategy = config.actor_rollout_ref.actor.strategy
    for key in user_set:
        if key in every_key and key not in own:
            yield key, f"actor_rollout_ref.actor.strategy is {strategy}"
            continue
        for effect in EFFECTS:
            if effect.covers(key) and effect.is_idle(config):
                yield key, effect.reason
                break
        if key == f"{ACTOR}.clip_ratio" and overrides_clip_ratio(user_set):
            yield key, "clip_ratio_low and clip_ratio_high are both set"


def overrides_clip_ratio(user_set: Iterable[str]) -> bool:
    return {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"} <= set(user_set)


def unread(user_set: Iterable[str], log: ReadLog) -> list[str]:
    """The user's settings that nothing has read so far."""
    return sorted(key for key in user_set if not log.has_read(key))


def report_unread(config: BaseConfig, user_set: Iterable[str], log: ReadLog) -> list[str]:
    """One line for each setting of the user's that the run never looked at, with the reason if
    there is a known one. For the end of a run.

    A key whose value another key took over counts as read when that other key was.
    """
    user_set = set(user_set)
    taken = {leader for key, leader in leaders(config) if key not in user_set and log.has_read(key)}
    never_read = unread(user_set - taken, log)  # first: finding reasons reads options too
    known = dict(without_effect(config, user_set))
    lines = []
    for key in never_read:
        reason = known.get(key, "nothing in this run read it")
        lines.append(f"{key} had no effect: {reason}")
    return lines


def leaders(config: BaseConfig) -> Iterator[tuple[str, str]]:
    """(key, the key its default follows) for every such default, through all steps of a chain."""
    defaults = next(
        variant.defaults
        for variant in family(type(config)).variants
        if type(variant.prototype) is type(config)
    )
    follows = {path: target(path, value) for path, value in defaults.items()}
    for path in follows:
        leader = follows[path]
        while leader is not None:
            yield ".".join(path), ".".join(leader)
            leader = follows.get(leader)


def target(path: tuple[str, ...], value: Any) -> tuple[str, ...] | None:
    """What an interpolation such as `${oc.select:a.b,1}` or `${..dtype}` at `path` points to."""
    found = REFERENCE.match(value) if isinstance(value, str) else None
    if found is None:
        return None
    dots, name = found.groups()
    base = path[: len(path) - len(dots)] if dots else ()
    return (*base, *name.split("."))
