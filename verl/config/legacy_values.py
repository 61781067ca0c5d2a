"""Old keys whose value has to be translated too.

Each function takes the way to the key (what `*` stood for in the rule), its value and all values
the user set, and gives today's keys with their values; None means that this value needs nothing.
"""

from typing import Any

from verl.config.variants import Values

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


def prometheus_switch(way: str, value: Any, values: Values) -> Today:
    """The engine must keep statistics for Prometheus to have something to read."""
    today = {f"{ROLLOUT}.prometheus.enable": value}
    return today | {f"{ROLLOUT}.disable_log_stats": False} if value is True else today


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
