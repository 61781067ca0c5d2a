"""OpenRLHF's flags (`python -m openrlhf.cli.train_ppo_ray --pretrain ...`).

Those of 0.11 have the section before the name (`--rollout.batch_size`); `SECTIONED` says which
older flag each one is, and `TABLE` has the rows of both.
"""

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


def betas(value: Any) -> Values:
    first, second = value.split() if isinstance(value, str) else value
    return {f"{ACTOR}.optim.betas": [float(first), float(second)]}


def loss(value: Any) -> Values:
    return {"ppo": {}, "gspo": {f"{ACTOR}.policy_loss.loss_mode": "gspo"}}[str(value)]


OLDER: Table = {
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
"""The flags before 0.11."""

SECTIONED = {
    "actor.model_name_or_path": "pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "train.agent_func_path": "agent_func_path",
    "data.prompt_dataset": "prompt_data",
    "eval.dataset": "eval_dataset",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.input_template": "input_template",
    "rollout.max_new_tokens": "generate_max_len",
    "data.max_samples": "max_samples",
    "train.seed": "seed",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.adam.weight_decay": "l2",
    "actor.max_norm": "max_norm",
    "algo.advantage.estimator": "advantage_estimator",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.dual_clip": "dual_clip",
    "critic.value_clip": "value_clip",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.lambd": "lambd",
    "actor.entropy_coef": "entropy_loss_coef",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.estimator": "kl_estimator",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "critic.freezing_steps": "freezing_actor_steps",
    "reward.normalize_enable": "normalize_reward",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enforce_eager": "enforce_eager",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.sync_backend": "vllm_sync_backend",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    **{
        f"{role}.{name}": f"{role}_{name}"
        for role in ("ref", "critic", "reward")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    "ds.zero_stage": "zero_stage",
    "ds.adam_offload": "adam_offload",
    "ref.offload": "ref_reward_offload",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.ring_attn_head_stride": "ring_head_stride",
    "ds.packing_samples": "packing_samples",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "ds.attn_implementation": "attn_implementation",
    "ds.param_dtype": "bf16",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.target_modules": "target_modules",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_steps": "save_steps",
    "eval.steps": "eval_steps",
    "ckpt.max_num": "max_ckpt_num",
    "logger.logging_steps": "logging_steps",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.save_hf": "save_hf_ckpt",
    "logger.wandb.key": "use_wandb",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
}
"""Each flag of 0.11 that had another name before."""

SPELLINGS = {old: new for new, old in SECTIONED.items()}
PROMPT_ROOM = "prompt and response together; data.max_prompt_length is what is left for the prompt"

TABLE: Table = {
    **OLDER,
    **{new: OLDER[old] for new, old in SECTIONED.items() if old in OLDER},
    "data.max_len": Row(note=PROMPT_ROOM),
    "actor.loss_agg_mode": Row(f"{ACTOR}.loss_agg_mode"),
    "actor.adam.betas": Row(convert=betas),
    "actor.aux_loss_coef": Row(f"{MODEL}.override_config.router_aux_loss_coef"),
    "actor.freeze_visual_encoder": on(f"{ACTOR}.freeze_vision_tower"),
    "algo.advantage.no_std_norm": Row(
        convert=lambda value: {"algorithm.norm_adv_by_std_in_grpo": value is False}
    ),
    "train.dynamic_batch_enable": on(f"{ACTOR}.use_dynamic_bsz"),
    "train.max_tokens_per_gpu": Row(f"{ACTOR}.ppo_max_token_len_per_gpu"),
    "rollout.max_tokens_per_gpu": Row(f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    "train.async_enable": Row(note="another command or trainer.v1.trainer_mode; see docs/async.md"),
    "eval.temperature": Row(f"{ROLLOUT}.val_kwargs.temperature"),
    "eval.n_samples_per_prompt": Row(f"{ROLLOUT}.val_kwargs.n"),
    "data.image_key": Row("data.image_key"),
    "data.max_images_per_prompt": Row(f"{ROLLOUT}.limit_images"),
    "critic.adam.weight_decay": Row("critic.optim.weight_decay"),
    "critic.lr_warmup_ratio": Row("critic.optim.lr_warmup_steps_ratio"),
    "critic.max_norm": Row("critic.grad_clip"),
    "ds.use_liger_kernel": Row(note="our own kernels take its place"),
}


def migrate(settings: Mapping[str, Any], num_gpus: int) -> Migration:
    """The run of these flags; how many devices there are is one of them."""
    migration = Migration("OpenRLHF's PPO")
    stated = dict(settings)

    def spelling(old: str) -> str:
        """The flag as the script has it."""
        return SPELLINGS[old] if SPELLINGS[old] in settings else old

    stated.setdefault(spelling("advantage_estimator"), "gae")
    per_prompt = stated.setdefault(spelling("n_samples_per_prompt"), 1)
    updates = stated.pop(spelling("train_batch_size"), None)
    coefficient = stated.pop(spelling("init_kl_coef"), None)
    is_loss = stated.pop(spelling("use_kl_loss"), False)
    kind = stated.pop(spelling("kl_estimator"), "k1")
    if spelling("actor_num_gpus_per_node") not in stated:
        migration.values["trainer.n_gpus_per_node"] = num_gpus
    migration.take(stated, TABLE)
    if coefficient is not None and not isinstance(coefficient, Expression):
        kl = kl_values(float(coefficient), is_loss, KL_TYPES.get(kind, "kl"))
        names = ("init_kl_coef", "use_kl_loss", "kl_estimator")
        migration.set(", ".join(map(spelling, names)), kl)
    if updates is not None and not isinstance(updates, Expression | None):
        name, samples, n = spelling("train_batch_size"), number(updates), number(per_prompt)
        if samples % n:
            migration.missing.append((name, f"{samples} are not whole groups of {n}"))
        else:
            note = f"prompts per update, not samples: {samples} / {n}"
            migration.set(name, {f"{ACTOR}.ppo_mini_batch_size": samples // n}, note)
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
