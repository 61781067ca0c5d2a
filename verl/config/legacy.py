"""Keys of older scripts, translated into the keys of today.

`RULES` is the table: the first rule that fits a key is taken. A rule applies to its key and to
everything below it, and only where the root has no option of that name itself (`rollout.n` is an
old spelling for the PPO trainer and a real key of the generation command). Where the value has to
be translated too, a function takes what `*` stood for, the value and all values the user set, and
gives today's keys with their values, or None if this value needs nothing.

Each old key gives exactly one notice. If today's key is set too, to another value, that is a fault:
which one is meant cannot be known.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.schema import Keys, Values, Variant
from verl.config.second_generation import ENTRIES

Today = dict[str, Any]
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
REJECTION_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Translation = Callable[[str, Any, Values], "dict[str, Any] | None"]
ACTOR = "actor_rollout_ref.actor"
NSYS = "global_profiler.global_tool_config.nsys"
RECOMPUTE = "megatron.override_transformer_config.recompute"
CHECKPOINTING = "model.gradient_checkpointing_kwargs.activations_checkpoint"
AGENT_LOOPS = "agent loops took its place; see actor_rollout_ref.rollout.agent.default_agent_loop"


@dataclass(frozen=True)
class Rule:
    """What becomes of one old key; a leading `*` stands for any way to it, also none.

    `new` is today's key (`*` is filled in, and what lies below the old key moves along), or a
    function of the way, the value and all values that gives today's keys with their values (None:
    the rule is not about this value), or None for a key that means nothing any more.
    `is_about_value` marks rules about a key that still exists, `completes` those whose function
    builds on the value of today's key instead of replacing it. A key without meaning is not
    mentioned at the values `off`; at others, `refuses` makes it a fault.
    """

    old: str
    new: "str | Translation | None"
    why: str = ""
    is_about_value: bool = False
    completes: bool = False
    off: tuple[Any, ...] = ()
    refuses: bool = False

    def asks_for_nothing(self, value: Any) -> bool:
        follows = isinstance(value, str) and value.startswith("${")  # a default of its own files
        return self.new is None and (follows or value in self.off)

    def way_to(self, path: str) -> str | None:
        """What `*` stands for in `path` ("" without a star), or None when the rule does not fit."""
        if self.old.startswith("*."):
            way, found, below = f".{path}.".partition(f"{self.old[1:]}.")
            way = way.removeprefix(".")
        else:
            _, found, below = f"{path}.".partition(f"{self.old}.")
            way, found = "", found and path.startswith(self.old)
        return way if found and (not below or not callable(self.new)) else None

    def target(self, way: str, path: str) -> str:
        """Today's path for an old one, for a rule that only renames."""
        assert isinstance(self.new, str)
        start = f"{way}." if way else ""
        old, new = (text.replace("*.", start, 1) for text in (self.old, self.new))
        return new + path[len(old) :]


@dataclass
class Modernised:
    """The user's values under today's keys, a notice per old key, and the conflicts met."""

    values: Values
    notices: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def settle(self, old: str, value: Any, new: str, meant: Any, *, completes: bool) -> None:
        path = tuple(new.split("."))
        is_set = path in self.values and not completes
        if is_set and self.values[path] != meant:
            text = (
                f"{old} is {shown(value)}, which means {new}={short(meant)}, but {new} is set too, "
                f"to {short(self.values[path])}; remove one of the two"
            )
            self.faults.append(Fault(text, (old, new)))
        self.values[path] = meant


@dataclass(frozen=True)
class Meaning:
    """What an old key with its value comes to today: keys with values, and the reason."""

    values: dict[str, Any]
    why: str
    completes: bool
    is_silent: bool = False
    is_refused: bool = False


def modernise(
    values: Values, variant: Variant, every_key: Keys, *, decided: Collection[str] = ()
) -> Modernised:
    """Translate every old key; values under today's keys stay as they are.

    `every_key` are the keys of the variant and of its siblings. A key in `decided` stands on the
    command line and wins over an old spelling in a file, as it does over today's.
    """
    settings = variant.defaults | values
    meanings = {
        path: meaning_of(".".join(path), value, settings, (variant.keys, every_key))
        for path, value in values.items()
    }
    result = Modernised({path: values[path] for path in values if meanings[path] is None})
    for path, meaning in meanings.items():
        if meaning is not None:
            old, value = ".".join(path), values[path]
            if meaning.is_refused:
                result.faults.append(Fault(f"{old} is {shown(value)}; {meaning.why}", (old,)))
            elif not meaning.is_silent:
                result.notices.append(notice(old, value, meaning))
            for new, meant in meaning.values.items():
                if old in decided or new not in decided:
                    result.settle(old, value, new, meant, completes=meaning.completes)
    return result


def meaning_of(
    path: str, value: Any, settings: Values, scopes: tuple[Keys, Keys]
) -> Meaning | None:
    """Follow the rules until only keys of today are left; None when `path` is one already.

    A rule that leads to a key of this variant is preferred to one that leads to a sibling's.
    """
    for scope in scopes:
        for rule, way in rules_for(path):
            translated = translate(rule, way, path, value, settings, scopes[0])
            if translated is None:
                continue
            meant, why = {}, rule.why
            is_silent = rule.asks_for_nothing(value)
            is_refused = rule.refuses and not is_silent
            for new, one in translated.items():
                further = meaning_of(new, one, settings, scopes) if new != path else None
                meant.update(further.values if further else {new: one})
                if further:
                    why = further.why or why
                    is_silent, is_refused = further.is_silent, further.is_refused
            if all(new in scope for new in meant):
                return Meaning(meant, why, rule.completes, is_silent, is_refused)
    return None


@cache
def rules_for(path: str) -> list[tuple[Rule, str]]:
    """The rules that fit a key, in order, each with what its `*` stands for."""
    ways = [(rule, rule.way_to(path)) for rule in RULES]
    return [(rule, way) for rule, way in ways if way is not None]


def translate(
    rule: Rule, way: str, path: str, value: Any, settings: Values, keys: Keys
) -> dict[str, Any] | None:
    """One step of one rule; None when the rule is not about this value."""
    if (value is None or not rule.is_about_value) and path in keys:
        return None
    if rule.new is None:
        return {}
    if callable(rule.new):
        return rule.new(way, value, settings)
    return {rule.target(way, path): value}


def renamed(path: str, keys: Keys) -> str | None:
    """Today's key for an old one that is merely a rename; None when there is more to it."""
    if path in keys:
        return None
    for rule, way in rules_for(path)[:1]:
        if isinstance(rule.new, str):
            new = rule.target(way, path)
            return new if new in keys else renamed(new, keys)
    return None


def is_old(path: str, keys: Keys) -> bool:
    """Whether some rule knows this key, so that it may be written on a command line."""
    return path not in keys and bool(rules_for(path))


def notice(old: str, value: Any, meaning: Meaning) -> str:
    reason = f" ({meaning.why})" if meaning.why else ""
    if not meaning.values:
        return f"{old} has no effect{reason}"
    today = [key if one == value else f"{key}={short(one)}" for key, one in meaning.values.items()]
    return f"{old} is now {' and '.join(today)}{reason}"


def short(value: Any, limit: int = 60) -> str:
    text = shown(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def setting(values: Values, key: str, default: Any) -> Any:
    value = values.get(tuple(key.split(".")))
    return default if value is None else value


def chat_template(way: str, value: Any, values: Values) -> Today | None:
    """A named template becomes its Jinja text; anything else is the text already."""
    if value is None:
        return None
    return {"actor_rollout_ref.model.custom_chat_template": CHATML if value == "chatml" else value}


def peft_type(way: str, value: Any, values: Values) -> Today | None:
    if str(value).lower() in ("lora", "none"):
        return {}
    return {"actor_rollout_ref.model.peft_type": value}


def max_turns(way: str, value: Any, values: Values) -> Today:
    turns = f"{ROLLOUT}.multi_turn"
    return {f"{turns}.max_assistant_turns": value, f"{turns}.max_user_turns": value}


def fp8_rollout(way: str, value: Any, values: Values) -> Today | None:
    return {f"{ROLLOUT}.quantization": "fp8"} if str(value).lower() == "fp8" else None


def sanity_check_mode(way: str, value: Any, values: Values) -> Today:
    key = f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode"
    return {key: "strict" if value else "disable"}


def multi_turn_switch(way: str, value: Any, values: Values) -> Today | None:
    return {f"{ROLLOUT}.multi_turn.enable": value} if isinstance(value, bool) else None


def sync_mode(way: str, value: Any, values: Values) -> Today | None:
    return {f"{ROLLOUT}.mode": "async"} if value == "sync" else None


def rejection_bounds(way: str, value: Any, values: Values) -> Today | None:
    """A lower and an upper bound are one text now, "lower_upper"."""
    if value is None:
        return None
    upper = setting(values, f"{CORRECTION}.rollout_rs_threshold", 1 / float(value))
    return {f"{CORRECTION}.rollout_rs_threshold": f"{value}_{upper}"}


def policy_gradient(way: str, value: Any, values: Values) -> Today:
    if not value:
        return {}
    return {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"}


def rejection_names(way: str, value: Any, values: Values) -> Today | None:
    if value not in REJECTION_NAMES:
        return None
    return {f"{CORRECTION}.rollout_rs": REJECTION_NAMES[value]}


def importance_sampling(way: str, value: Any, values: Values) -> Today:
    """The five keys `algorithm.rollout_is*` worked together; the threshold switched them on.

    Truncating multiplied the loss by weights (`rollout_is` today), masking rejected what lay
    outside the bounds (`rollout_rs` today).
    """
    threshold = setting(values, "algorithm.rollout_is_threshold", None)
    is_on = setting(values, "algorithm.rollout_is", True)
    if isinstance(is_on, str):
        return {f"{CORRECTION}.rollout_is": is_on}
    if threshold is None or not is_on:
        return {}
    level = setting(values, "algorithm.rollout_is_level", "token")
    if setting(values, "algorithm.rollout_is_mode", "truncate") == "truncate":
        key = "sequence" if level == "geometric" else level
        return {f"{CORRECTION}.rollout_is": key, f"{CORRECTION}.rollout_is_threshold": threshold}
    lower = setting(values, "algorithm.rollout_is_threshold_lower", 1 / float(threshold))
    return {
        f"{CORRECTION}.rollout_rs": REJECTION_NAMES[level],
        f"{CORRECTION}.rollout_rs_threshold": f"{lower}_{threshold}",
    }


def truncated_importance_sampling(way: str, value: Any, values: Values) -> Today:
    """A cap that is not positive meant off."""
    if value is None or float(value) <= 0:
        return {}
    return {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": value}


def underscores(way: str, value: Any, values: Values) -> Today | None:
    """`clip-cov` and `kl-cov` were written with a dash in older documentation."""
    if value not in ("clip-cov", "kl-cov"):
        return None
    return {"actor_rollout_ref.actor.policy_loss.loss_mode": value.replace("-", "_")}


def min_lr_from_ratio(way: str, value: Any, values: Values) -> Today | None:
    """Megatron's schedule knows a lowest rate, not its ratio to the learning rate."""
    section = f"{way}.optim" if way else "optim"
    lr = setting(values, f"{section}.lr", None)
    if value is None or lr is None:
        return None
    return {f"{section}.min_lr": float(value) * float(lr)}


def never_saves(way: str, value: Any, values: Values) -> Today | None:
    return {"trainer.save_freq": -1} if value is False else None


def never_tests(way: str, value: Any, values: Values) -> Today | None:
    return {"trainer.test_freq": -1} if value is False else None


def one_checkpoint(way: str, value: Any, values: Values) -> Today | None:
    if value is not True:
        return None
    return {"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}


RULES: list[Rule] = [
    # Short and early spellings.
    Rule("rollout", ROLLOUT),
    Rule("reward_model.reward_fn", "custom_reward_function"),
    Rule("reward_model.custom_reward_function", "custom_reward_function"),
    Rule("reward.custom_reward_function", "custom_reward_function"),
    Rule("reward.reward_manager", "reward_manager"),
    Rule("reward.reward_kwargs", "reward_model.reward_kwargs"),
    Rule("reward.reward_model", "reward_model"),
    Rule("reward.sandbox_fusion", "reward_model.sandbox_fusion"),
    Rule("reward.num_workers", "reward_model.num_workers"),
    Rule("data.chat_template", chat_template, is_about_value=True),
    Rule("critic.kl_ctrl", "algorithm.kl_ctrl"),
    Rule(f"{ACTOR}.peft.peft_type", peft_type, "lora_rank > 0 turns it on"),
    Rule(f"{ACTOR}.peft", "actor_rollout_ref.model"),
    Rule(f"{ROLLOUT}.multi_turn.max_turns", max_turns),
    Rule(f"{ROLLOUT}.dtype", fp8_rollout, is_about_value=True),
    Rule("trainer.prometheus", f"{ROLLOUT}.prometheus"),
    Rule("*.optim.warmup_steps_proportion", "*.optim.lr_warmup_steps_ratio"),
    Rule("*.optim.warmup_steps_ratio", "*.optim.lr_warmup_steps_ratio"),
    Rule("*.optim.lr_scheduler", "*.optim.lr_scheduler_type"),
    Rule("*.model.enable_activation_offloading", "*.model.enable_activation_offload"),
    Rule("model.path", "model.partial_pretrain"),
    Rule("trainer.resume_path", "trainer.resume_from_path"),
    # Rollout.
    Rule(
        f"{ROLLOUT}.update_weights_bucket_megabytes",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Rule(
        f"{ROLLOUT}.engine_kwargs.swap_space",
        f"{ROLLOUT}.engine_kwargs.vllm.swap_space",
        is_about_value=True,
    ),
    Rule(f"{ROLLOUT}.sglang_rollout_mode", None, "SGLang always runs as a server"),
    Rule("*.model.torch_dtype", None, "fsdp_config.dtype and model_dtype say how to compute"),
    Rule(f"{ROLLOUT}.multi_turn.completion_callback", None, AGENT_LOOPS),
    Rule(f"{ROLLOUT}.chat_scheduler", None, AGENT_LOOPS),
    Rule(f"{ROLLOUT}.multi_turn.enable_tokenization_sanity_check", sanity_check_mode),
    Rule(f"{ROLLOUT}.use_fire_sampling", None, "this way of sampling is not offered any more"),
    Rule(
        f"{ROLLOUT}.tool_kwargs.tools_config_file",
        f"{ROLLOUT}.multi_turn.tool_config_path",
    ),
    Rule(
        f"{ROLLOUT}.interaction_config_file",
        f"{ROLLOUT}.multi_turn.interaction_config_path",
    ),
    Rule(f"{ROLLOUT}.multi_turn", multi_turn_switch, is_about_value=True),
    Rule(
        f"{ROLLOUT}.mode",
        sync_mode,
        "every rollout is asynchronous; the results are the same",
        is_about_value=True,
    ),
    # Asynchronous training.
    Rule(
        "async_training.checkpoint_engine.device_buffer_size_M",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Rule("async_training.checkpoint_engine", None, f"{ROLLOUT}.checkpoint_engine has its options"),
    # Off-policy correction.
    Rule(f"{CORRECTION}.rollout_rs_threshold_lower", rejection_bounds, completes=True),
    Rule(f"{CORRECTION}.rollout_token_veto_threshold", None, "use rollout_rs to reject tokens"),
    Rule(f"{CORRECTION}.use_policy_gradient", policy_gradient),
    Rule(f"{CORRECTION}.rollout_rs", rejection_names, is_about_value=True),
    Rule("algorithm.rollout_is_veto_threshold", None, f"use {CORRECTION}.rollout_rs"),
    Rule("algorithm.rollout_is", importance_sampling),
    Rule("algorithm.rollout_is_threshold", importance_sampling),
    Rule("algorithm.rollout_is_threshold_lower", importance_sampling),
    Rule("algorithm.rollout_is_level", importance_sampling),
    Rule("algorithm.rollout_is_mode", importance_sampling),
    Rule(f"{ACTOR}.tis_imp_ratio_cap", truncated_importance_sampling),
    # Rewards.
    Rule("reward_model.model.type", None, "the weights tell what kind of model it is"),
    Rule("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    # Actor and critic.
    *(
        Rule(f"{ACTOR}.{name}", f"{ACTOR}.policy_loss.{name}")
        for name in (
            "loss_mode",
            "clip_cov_ratio",
            "clip_cov_lb",
            "clip_cov_ub",
            "kl_cov_ratio",
            "ppo_kl_coef",
        )
    ),
    Rule(f"{ACTOR}.policy_loss.loss_mode", underscores, is_about_value=True),
    Rule("*.optim.warmup_style", "*.optim.lr_scheduler_type", is_about_value=True),
    Rule("*.optim.warmup_style", "*.optim.lr_decay_style"),
    Rule("*.optim.grad_clip", "*.optim.clip_grad", is_about_value=True),
    Rule("actor_rollout_ref.actor.optim.clip_grad", f"{ACTOR}.grad_clip", is_about_value=True),
    Rule("critic.optim.clip_grad", "critic.grad_clip", is_about_value=True),
    Rule("*.optim.min_lr_ratio", min_lr_from_ratio),
    Rule("*.checkpoint.contents", "*.checkpoint.save_contents"),
    Rule("*.fsdp_config.grad_offload", None, "gradients stay with the weights; use offload_policy"),
    Rule("*.fsdp_config.min_num_params", "*.fsdp_config.wrap_policy.min_num_params"),
    Rule(
        "*.megatron.num_layers_per_virtual_pipeline_stage",
        "*.megatron.virtual_pipeline_model_parallel_size",
    ),
    Rule("actor_rollout_ref.ref.param_offload", "actor_rollout_ref.ref.megatron.param_offload"),
    Rule("reward_model.param_offload", "reward_model.megatron.param_offload"),
    *(
        Rule(f"{old}.{CHECKPOINTING}_{name}", f"{new}.{RECOMPUTE}_{name}")
        for name in ("method", "granularity", "num_layers")
        for old, new in (("actor_rollout_ref", ACTOR), ("critic", "critic"))
    ),
    # Trainer, profiler, Ray.
    Rule("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    Rule("trainer.remove_previous_ckpt_in_save", one_checkpoint, is_about_value=True),
    Rule("trainer.save_freq", never_saves, is_about_value=True),
    Rule("trainer.test_freq", never_tests, is_about_value=True),
    Rule("trainer.tensorboard_dir", None, "the variable TENSORBOARD_DIR names the folder"),
    Rule("trainer.rl_logging_board_dir", None, "trainer.rollout_data_dir has all responses"),
    Rule("trainer.profile_steps", "global_profiler.steps"),
    Rule("trainer.controller_nsight_options", f"{NSYS}.controller_nsight_options"),
    Rule("trainer.worker_nsight_options", f"{NSYS}.worker_nsight_options"),
    Rule("actor_rollout_ref.profiler", f"{ACTOR}.profiler"),
    Rule("*.profile.use_profile", "*.profiler.enable"),
    Rule("*.profile.profile_ranks", "*.profiler.ranks"),
    Rule("*.profile.step_start", None, "global_profiler.steps lists the steps to profile"),
    Rule("*.profile.step_end", None, "global_profiler.steps lists the steps to profile"),
    Rule("*.profile", "*.profiler"),
    Rule("*.profiler.discrete", "*.profiler.tool_config.nsys.discrete"),
    Rule("*.profiler.tool_config.torch.step_start", None, "global_profiler.steps lists the steps"),
    Rule("*.profiler.tool_config.torch.step_end", None, "global_profiler.steps lists the steps"),
    Rule("ray_init.num_cpus", "ray_kwargs.ray_init.num_cpus"),
    Rule("ray_init.timeline_json_file", "ray_kwargs.timeline_json_file"),
    # verl 0.8 and 0.9.
    *(Rule(one.old, one.new, one.why, off=one.off, refuses=one.refuses) for one in ENTRIES),
]
