"""The table of old keys: what each one is called today, or why it means nothing any more.

The order matters where one old key lies below another: the first rule that fits is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.config.legacy_values import (
    CORRECTION,
    ROLLOUT,
    chat_template,
    fp8_rollout,
    importance_sampling,
    max_turns,
    min_lr_from_ratio,
    multi_turn_switch,
    never_saves,
    never_tests,
    one_checkpoint,
    peft_type,
    policy_gradient,
    prometheus_switch,
    rejection_bounds,
    rejection_names,
    sanity_check_mode,
    sync_mode,
    truncated_importance_sampling,
    underscores,
)
from verl.config.variants import Values

Translation = Callable[[str, Any, Values], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Rule:
    """What becomes of one old key; a leading `*` stands for any way to it, also none.

    `new` is today's key (`*` is filled in, and what lies below the old key moves along), or a
    function of the way, the value and all values that gives today's keys with their values (None:
    the rule is not about this value), or None for a key that means nothing any more.
    `is_about_value` marks rules about a key that still exists, `completes` those whose function
    builds on the value of today's key instead of replacing it.
    """

    old: str
    new: "str | Translation | None"
    why: str = ""
    is_about_value: bool = False
    completes: bool = False

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


ACTOR = "actor_rollout_ref.actor"
NSYS = "global_profiler.global_tool_config.nsys"
RECOMPUTE = "megatron.override_transformer_config.recompute"
CHECKPOINTING = "model.gradient_checkpointing_kwargs.activations_checkpoint"
AGENT_LOOPS = "agent loops took its place; see actor_rollout_ref.rollout.agent.default_agent_loop"

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
    Rule("trainer.prometheus.enable", prometheus_switch),
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
]
