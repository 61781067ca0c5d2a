"""TRL's `GRPOConfig` and `GRPOTrainer`, from a Python file or a YAML of `trl grpo`.

TRL counts completions per device where we count prompts over all devices:

    completions per generation   per_device_train_batch_size x devices x steps_per_generation
    completions per update       per_device_train_batch_size x devices x gradient_accumulation_steps

What the file leaves to TRL's defaults is stated, since ours differ.
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

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 256,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "num_iterations": 1,
}
SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
)
FILES = "prompts are read from parquet or jsonl files with a column of messages; see docs/data.md"
CORRECTION = "algorithm.rollout_correction"


def loss_type(value: Any) -> Values:
    return {
        "grpo": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        "dapo": {f"{ACTOR}.loss_agg_mode": "token-mean"},
        "bnpo": {f"{ACTOR}.loss_agg_mode": "token-mean"},
        "dr_grpo": {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
        "cispo": {f"{ACTOR}.policy_loss.loss_mode": "cispo"},
        "sapo": {f"{ACTOR}.policy_loss.loss_mode": "sapo"},
    }[str(value)]


def scale_rewards(value: Any) -> Values:
    kinds = {"group": True, "True": True, "none": False, "False": False}
    return {"algorithm.norm_adv_by_std_in_grpo": kinds[str(value)]}


def kl_loss(value: Any) -> Values:
    if float(value) == 0:
        return {f"{ACTOR}.use_kl_loss": False}
    return {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": float(value),
        f"{ACTOR}.kl_loss_type": "low_var_kl",
    }


def level(value: Any) -> Values:
    return {"token": {}, "sequence": {f"{ACTOR}.policy_loss.loss_mode": "gspo"}}[str(value)]


def engine(value: Any) -> Values:
    return {f"{ROLLOUT}.name": "vllm" if value else "native"}


def steps(value: Any) -> Values:
    return {} if number(value) < 0 else {"trainer.total_training_steps": number(value)}


def schedule(value: Any) -> Values:
    kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant"}
    kinds["constant_with_warmup"] = "constant"
    return {f"{ACTOR}.optim.lr_scheduler_type": kinds[str(value)]}


def trackers(value: Any) -> Values:
    names = [value] if isinstance(value, str) else list(value)
    known = [name for name in names if name not in ("none", "all")]
    return {"trainer.logger": ["console", *known]}


def is_correction(value: Any) -> Values:
    kinds = {"token_truncate": "token", "sequence_truncate": "sequence"}
    return {f"{CORRECTION}.rollout_is": kinds[str(value)]}


TABLE: Table = {
    "model_name_or_path": Row(f"{MODEL}.path"),
    "model": Row(f"{MODEL}.path"),
    "trust_remote_code": Row(f"{MODEL}.trust_remote_code"),
    "gradient_checkpointing": Row(f"{MODEL}.enable_gradient_checkpointing"),
    "lora_r": Row(f"{MODEL}.lora_rank"),
    "lora_alpha": Row(f"{MODEL}.lora_alpha"),
    "lora_target_modules": Row(f"{MODEL}.target_modules"),
    "use_peft": Row(note="lora_r > 0 turns it on"),
    "bf16": Row(note="weights are fp32 and computed in bf16 (fsdp_config.dtype) as it is"),
    "fp16": Row(note="computing is in bf16; fsdp_config.dtype has other types"),
    "attn_implementation": Row(note="attention is ours, or override_config.attn_implementation"),
    "torch_dtype": Row(note="weights are fp32 and computed in bf16; see fsdp_config"),
    "dataset_name": Row("data.train_files", FILES),
    "train_dataset": Row("data.train_files", FILES),
    "eval_dataset": Row("data.val_files", FILES),
    "reward_funcs": Row(
        note="a function (data_source, solution_str, ground_truth, extra_info) in "
        "custom_reward_function.path; see docs/rewards.md"
    ),
    "reward_weights": Row(note="let one reward function add them up"),
    "max_prompt_length": Row("data.max_prompt_length"),
    "max_completion_length": Row("data.max_response_length"),
    "shuffle_dataset": Row("data.shuffle"),
    "seed": Row("data.seed"),
    "chat_template_kwargs": Row("data.apply_chat_template_kwargs"),
    "learning_rate": Row(f"{ACTOR}.optim.lr"),
    "lr_scheduler_type": Row(convert=schedule),
    "warmup_steps": Row(f"{ACTOR}.optim.lr_warmup_steps"),
    "warmup_ratio": Row(f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    "weight_decay": Row(f"{ACTOR}.optim.weight_decay"),
    "max_grad_norm": Row(f"{ACTOR}.grad_clip"),
    "num_iterations": Row(f"{ACTOR}.ppo_epochs"),
    "epsilon": Row(f"{ACTOR}.clip_ratio_low"),
    "epsilon_high": Row(f"{ACTOR}.clip_ratio_high"),
    "delta": Row(f"{ACTOR}.clip_ratio_c", "it bounds the ratio where the advantage is negative"),
    "beta": Row(convert=kl_loss),
    "loss_type": Row(convert=loss_type),
    "scale_rewards": Row(convert=scale_rewards),
    "importance_sampling_level": Row(convert=level),
    "entropy_coef": Row(f"{ACTOR}.entropy_coeff"),
    "sapo_temperature_pos": Row(f"{ACTOR}.tau_pos"),
    "sapo_temperature_neg": Row(f"{ACTOR}.tau_neg"),
    "mask_truncated_completions": Row(note="cut responses are trained; see overlong_buffer"),
    "top_entropy_quantile": Row(note="every token is trained"),
    "sync_ref_model": Row(note="the reference stays as it was loaded"),
    "use_vllm": Row(convert=engine),
    "vllm_mode": Row(note="the engine shares the trainer's devices unless hybrid_engine is False"),
    "vllm_gpu_memory_utilization": Row(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Row(f"{ROLLOUT}.tensor_model_parallel_size"),
    "vllm_max_model_length": Row(f"{ROLLOUT}.max_model_len"),
    "vllm_importance_sampling_correction": Row(note="vllm_importance_sampling_mode chooses it"),
    "vllm_importance_sampling_mode": Row(convert=is_correction),
    "vllm_importance_sampling_cap": Row(f"{CORRECTION}.rollout_is_threshold"),
    "vllm_importance_sampling_clip_max": Row(f"{CORRECTION}.rollout_is_threshold"),
    "temperature": Row(f"{ROLLOUT}.temperature"),
    "top_p": Row(f"{ROLLOUT}.top_p"),
    "top_k": Row(convert=lambda value: {f"{ROLLOUT}.top_k": number(value or -1) or -1}),
    "repetition_penalty": Row(f"{ROLLOUT}.repetition_penalty"),
    "min_p": Row(note="rollouts have temperature, top_p, top_k and repetition_penalty"),
    "num_train_epochs": Row("trainer.total_epochs"),
    "max_steps": Row(convert=steps),
    "save_steps": Row("trainer.save_freq"),
    "eval_steps": Row("trainer.test_freq"),
    "save_total_limit": Row("trainer.max_actor_ckpt_to_keep"),
    "output_dir": Row("trainer.default_local_dir"),
    "run_name": Row("trainer.experiment_name"),
    "report_to": Row(convert=trackers),
    "logging_steps": Row(note="every step is logged"),
    "log_completions": Row("trainer.log_val_generations", "validation's responses are logged",
                           lambda value: {"trainer.log_val_generations": 10 if value else 0}),
    "num_completions_to_print": Row("trainer.log_val_generations"),
}  # fmt: skip


def migrate(settings: Mapping[str, Any], num_gpus: int) -> Migration:
    """The run of a `GRPOConfig` on `num_gpus` devices."""
    migration = Migration("TRL's GRPO")
    migration.values["algorithm.adv_estimator"] = "grpo"
    migration.values["trainer.n_gpus_per_node"] = num_gpus
    stated = dict(settings)
    for name, value in DEFAULTS.items():
        stated.setdefault(name, value)
    if "epsilon_high" not in stated:
        stated["epsilon_high"] = stated["epsilon"]
    sizes = {name: stated.pop(name) for name in SIZES if name in stated}
    betas = [stated.pop("adam_beta1", 0.9), stated.pop("adam_beta2", 0.999)]
    migration.take(stated, TABLE)
    migration.set("adam_beta1, adam_beta2", {f"{ACTOR}.optim.betas": betas})
    batch_sizes(migration, sizes, num_gpus)
    return migration


def batch_sizes(migration: Migration, sizes: Mapping[str, Any], num_gpus: int) -> None:
    computed = [name for name, value in sizes.items() if isinstance(value, Expression)]
    if computed:
        text = "batch sizes follow from it: set data.train_batch_size and actor.ppo_mini_batch_size"
        migration.missing += [(name, f"its value is computed; {text}") for name in computed]
        return
    n, per_device = number(sizes["num_generations"]), number(sizes["per_device_train_batch_size"])
    per_update = per_device * num_gpus * number(sizes["gradient_accumulation_steps"])
    rounds = sizes.get("steps_per_generation") or sizes["gradient_accumulation_steps"]
    generated = number(sizes.get("generation_batch_size") or per_device * num_gpus * number(rounds))
    migration.set("num_generations", {f"{ROLLOUT}.n": n})
    if generated % n or per_update % n:
        text = f"{generated} completions are not whole groups of {n}; choose other batch sizes"
        migration.missing.append(("generation_batch_size", text))
        return
    migration.set(
        "per_device_train_batch_size",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": per_device},
        "it is the size of a forward pass, and changes no gradient",
    )
    migration.set(
        "generation_batch_size",
        {"data.train_batch_size": generated // n},
        f"prompts, not completions: {generated} / {n}",
    )
    migration.set(
        "gradient_accumulation_steps",
        {f"{ACTOR}.ppo_mini_batch_size": min(per_update, generated) // n},
        f"prompts per update over all devices: {min(per_update, generated)} / {n}",
    )
