"""OpenRLHF's flags (`python -m openrlhf.cli.train_ppo_ray --pretrain ...`)."""

from collections.abc import Mapping
from typing import Any

from verl.migrate.plan import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Expression,
    Migration,
    Row,
    Table,
    Values,
    number,
)

ESTIMATORS: dict[str, Values] = {
    "gae": {"algorithm.adv_estimator": "gae"},
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "group_norm": {"algorithm.adv_estimator": "grpo"},
    "dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
}
KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
ALWAYS = "it is so here"
PLACE = "roles share the devices; trainer.n_gpus_per_node and nnodes count them"
TEMPLATE = "prompts are messages and the tokenizer has the template"


def on(target: str) -> Row:
    """A flag without a value."""
    return Row(target, convert=lambda value: {target: value is not False})


def low_high(value: Any) -> Values:
    low, high = value.split() if isinstance(value, str) else value
    return {f"{ACTOR}.clip_ratio_low": float(low), f"{ACTOR}.clip_ratio_high": float(high)}


def loss(value: Any) -> Values:
    return {"ppo": {}, "gspo": {f"{ACTOR}.policy_loss.loss_mode": "gspo"}}[str(value)]


TABLE: Table = {
    "pretrain": Row(f"{MODEL}.path"),
    "critic_pretrain": Row("critic.model.path"),
    "reward_pretrain": Row(
        convert=lambda value: {"reward_model.enable": True, "reward_model.model.path": value}
    ),
    "remote_rm_url": Row(
        note="a reward function of yours in custom_reward_function.path; see docs/rewards.md"
    ),
    "agent_func_path": Row(note="agent loops take its place; see docs/agent_loops.md"),
    "prompt_data": Row("data.train_files", "parquet or jsonl files; see docs/data.md"),
    "eval_dataset": Row("data.val_files", "parquet or jsonl files; see docs/data.md"),
    "input_key": Row("data.prompt_key", "the column holds messages, not text"),
    "label_key": Row(note="the answer is reward_model.ground_truth of a row; see docs/data.md"),
    "apply_chat_template": Row(note=TEMPLATE),
    "input_template": Row(note=TEMPLATE),
    "prompt_max_len": Row("data.max_prompt_length"),
    "generate_max_len": Row("data.max_response_length"),
    "max_samples": Row("data.train_max_samples"),
    "seed": Row("data.seed"),
    "rollout_batch_size": Row("data.train_batch_size"),
    "n_samples_per_prompt": Row(f"{ROLLOUT}.n"),
    "micro_train_batch_size": Row(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "micro_rollout_batch_size": Row(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    "max_epochs": Row(f"{ACTOR}.ppo_epochs"),
    "num_episodes": Row("trainer.total_epochs"),
    "actor_learning_rate": Row(f"{ACTOR}.optim.lr"),
    "critic_learning_rate": Row("critic.optim.lr"),
    "lr_warmup_ratio": Row(f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    "lr_scheduler": Row(note="the rate is constant after warm-up; see optim.lr_scheduler_type"),
    "l2": Row(f"{ACTOR}.optim.weight_decay"),
    "max_norm": Row(f"{ACTOR}.grad_clip"),
    "advantage_estimator": Row(convert=lambda value: ESTIMATORS[str(value)]),
    "policy_loss_type": Row(convert=loss),
    "eps_clip": Row(f"{ACTOR}.clip_ratio"),
    "eps_clip_low_high": Row(convert=low_high),
    "dual_clip": Row(f"{ACTOR}.clip_ratio_c"),
    "value_clip": Row("critic.cliprange_value"),
    "gamma": Row("algorithm.gamma"),
    "lambd": Row("algorithm.lam"),
    "entropy_loss_coef": Row(f"{ACTOR}.entropy_coeff"),
    "dynamic_filtering": on("algorithm.filter_groups.enable"),
    "overlong_buffer_len": Row("reward_model.reward_kwargs.overlong_buffer_cfg.len"),
    "overlong_penalty_factor": Row("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor"),
    "freezing_actor_steps": Row("trainer.critic_warmup"),
    "normalize_reward": Row(note="rewards are taken as they are; advantages are normalised"),
    "temperature": Row(f"{ROLLOUT}.temperature"),
    "top_p": Row(f"{ROLLOUT}.top_p"),
    "vllm_tensor_parallel_size": Row(f"{ROLLOUT}.tensor_model_parallel_size"),
    "vllm_gpu_memory_utilization": Row(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_num_engines": Row(convert=lambda value: {f"{ROLLOUT}.name": "vllm"},
                            note="there are as many engines as fit on the devices"),
    "enable_prefix_caching": on(f"{ROLLOUT}.enable_prefix_caching"),
    "enforce_eager": on(f"{ROLLOUT}.enforce_eager"),
    "vllm_enable_sleep": Row(note=ALWAYS),
    "vllm_sync_backend": Row(note="weights travel as rollout.checkpoint_engine says"),
    "deepspeed_enable_sleep": Row(note=ALWAYS),
    "colocate_all_models": Row(note=ALWAYS),
    "colocate_actor_ref": Row(note=ALWAYS),
    "actor_num_nodes": Row("trainer.nnodes"),
    "actor_num_gpus_per_node": Row("trainer.n_gpus_per_node"),
    **dict.fromkeys(
        ("ref_num_nodes", "ref_num_gpus_per_node", "critic_num_nodes", "critic_num_gpus_per_node",
         "reward_num_nodes", "reward_num_gpus_per_node"),
        Row(note=PLACE),
    ),
    "zero_stage": Row(note="weights, gradients and optimizer are sharded (FSDP)"),
    "adam_offload": on(f"{ACTOR}.fsdp_config.optimizer_offload"),
    "ref_reward_offload": on("actor_rollout_ref.ref.fsdp_config.param_offload"),
    "ring_attn_size": Row(f"{ACTOR}.ulysses_sequence_parallel_size",
                          "heads are exchanged instead of blocks of keys (Ulysses)"),
    "ring_head_stride": Row(note="there are no rings"),
    "packing_samples": on(f"{MODEL}.use_remove_padding"),
    "gradient_checkpointing": on(f"{MODEL}.enable_gradient_checkpointing"),
    "flash_attn": Row(note=ALWAYS),
    "attn_implementation": Row(note=ALWAYS),
    "bf16": Row(note=ALWAYS),
    "lora_rank": Row(f"{MODEL}.lora_rank"),
    "lora_alpha": Row(f"{MODEL}.lora_alpha"),
    "target_modules": Row(f"{MODEL}.target_modules"),
    "save_path": Row(note="checkpoints have the final weights; verl.model_merger exports them"),
    "ckpt_path": Row("trainer.default_local_dir"),
    "save_steps": Row("trainer.save_freq"),
    "eval_steps": Row("trainer.test_freq"),
    "max_ckpt_num": Row("trainer.max_actor_ckpt_to_keep"),
    "logging_steps": Row(note="every step is logged"),
    "load_checkpoint": Row(note="trainer.resume_mode=auto does so"),
    "save_hf_ckpt": Row(note="checkpoint.save_contents lists hf_model"),
    "use_wandb": Row(convert=lambda value: {"trainer.logger": ["console", "wandb"]}),
    "use_tensorboard": Row(convert=lambda value: {"trainer.logger": ["console", "tensorboard"]}),
    "wandb_project": Row("trainer.project_name"),
    "wandb_run_name": Row("trainer.experiment_name"),
}  # fmt: skip


def migrate(settings: Mapping[str, Any], num_gpus: int) -> Migration:
    """The run of these flags; how many devices there are is one of them."""
    migration = Migration("OpenRLHF's PPO")
    stated = {"advantage_estimator": "gae", "n_samples_per_prompt": 1, **settings}
    updates = stated.pop("train_batch_size", None)
    coefficient = stated.pop("init_kl_coef", None)
    is_loss, kind = stated.pop("use_kl_loss", False), stated.pop("kl_estimator", "k1")
    if "actor_num_gpus_per_node" not in stated:
        migration.values["trainer.n_gpus_per_node"] = num_gpus
    migration.take(stated, TABLE)
    if coefficient is not None and not isinstance(coefficient, Expression):
        kl = kl_values(float(coefficient), is_loss, KL_TYPES.get(kind, "kl"))
        migration.set("init_kl_coef, use_kl_loss, kl_estimator", kl)
    per_prompt = stated["n_samples_per_prompt"]
    if updates is not None and not isinstance(updates, Expression | None):
        samples, n = number(updates), number(per_prompt)
        if samples % n:
            migration.missing.append(("train_batch_size", f"{samples} are not whole groups of {n}"))
        else:
            note = f"prompts per update, not samples: {samples} / {n}"
            migration.set("train_batch_size", {f"{ACTOR}.ppo_mini_batch_size": samples // n}, note)
    return migration


def kl_values(coefficient: float, is_loss: bool, kind: str) -> Values:
    if coefficient == 0:
        return {f"{ACTOR}.use_kl_loss": False, "algorithm.use_kl_in_reward": False}
    if is_loss:
        return {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": coefficient,
            f"{ACTOR}.kl_loss_type": kind,
        }
    return {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": coefficient,
        "algorithm.kl_penalty": kind,
    }
