"""Every old key is understood, said once, and never silently overruled."""

import pytest

from verl.config.effects import absent_faults
from verl.config.legacy import CHATML, RULES, modernise
from verl.config.load import load_config
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.schema import family, nested
from verl.config.second_generation import ENTRIES
from verl.config.sft import SFTConfig, SFTEngineConfig

R = "actor_rollout_ref.rollout"
A = "actor_rollout_ref.actor"
C = "algorithm.rollout_correction"
NSYS = "global_profiler.global_tool_config.nsys"
FLAGS = "override_transformer_config"
RECOMPUTE = "model.gradient_checkpointing_kwargs.activations_checkpoint"

# root, what an old script sets, what it means today
CASES = [
    # Early and short spellings.
    (PPOConfig, {"reward_model.reward_fn.path": "r.py"}, {"custom_reward_function.path": "r.py"}),
    (PPOConfig, {"reward_model.reward_fn.name": "f"}, {"custom_reward_function.name": "f"}),
    (
        PPOConfig,
        {"reward_model.custom_reward_function.path": "r.py"},
        {"custom_reward_function.path": "r.py"},
    ),
    (
        PPOConfig,
        {"data.chat_template": "chatml"},
        {"actor_rollout_ref.model.custom_chat_template": CHATML},
    ),
    (PPOConfig, {"critic.kl_ctrl.kl_coef": 0.1}, {"algorithm.kl_ctrl.kl_coef": 0.1}),
    (PPOConfig, {f"{A}.peft.peft_type": "lora"}, {}),
    (PPOConfig, {f"{A}.peft.lora_rank": 16}, {"actor_rollout_ref.model.lora_rank": 16}),
    (PPOConfig, {f"{A}.peft.lora_alpha": 64}, {"actor_rollout_ref.model.lora_alpha": 64}),
    (
        PPOConfig,
        {f"{A}.peft.target_modules": ["q_proj"]},
        {"actor_rollout_ref.model.target_modules": ["q_proj"]},
    ),
    (
        PPOConfig,
        {f"{R}.multi_turn.max_turns": 5},
        {f"{R}.multi_turn.max_assistant_turns": 5, f"{R}.multi_turn.max_user_turns": 5},
    ),
    (PPOConfig, {f"{R}.dtype": "fp8"}, {f"{R}.quantization": "fp8"}),
    (PPOConfig, {"trainer.prometheus.enable": True}, {f"{R}.prometheus.enable": True}),
    (PPOConfig, {"trainer.prometheus.port": 9091}, {f"{R}.prometheus.port": 9091}),
    (PPOConfig, {"rollout.n": 8}, {f"{R}.n": 8}),
    (SFTConfig, {"optim.warmup_steps_proportion": 0.2}, {"optim.lr_warmup_steps_ratio": 0.2}),
    (SFTConfig, {"optim.warmup_steps_ratio": 0.2}, {"optim.lr_warmup_steps_ratio": 0.2}),
    (SFTConfig, {"model.path": "m"}, {"model.partial_pretrain": "m"}),
    (SFTConfig, {"trainer.resume_path": "p"}, {"trainer.resume_from_path": "p"}),
    (SFTEngineConfig, {"optim.lr_scheduler": "cosine"}, {"optim.lr_scheduler_type": "cosine"}),
    # Rollout.
    (
        PPOConfig,
        {f"{R}.update_weights_bucket_megabytes": 512},
        {f"{R}.checkpoint_engine.update_weights_bucket_megabytes": 512},
    ),
    (
        PPOConfig,
        {"async_training.checkpoint_engine.device_buffer_size_M": 512},
        {f"{R}.checkpoint_engine.update_weights_bucket_megabytes": 512},
    ),
    (PPOConfig, {"async_training.checkpoint_engine.enable": False}, {}),
    (PPOConfig, {f"{R}.engine_kwargs.swap_space": 4}, {f"{R}.engine_kwargs.vllm.swap_space": 4}),
    (PPOConfig, {f"{R}.multi_turn.completion_callback": "x"}, {}),
    (PPOConfig, {f"{R}.chat_scheduler": "x"}, {}),
    (
        PPOConfig,
        {f"{R}.multi_turn.enable_tokenization_sanity_check": False},
        {f"{R}.multi_turn.tokenization_sanity_check_mode": "disable"},
    ),
    (PPOConfig, {f"{R}.use_fire_sampling": False}, {}),
    (
        PPOConfig,
        {f"{R}.tool_kwargs.tools_config_file": "t.yaml"},
        {f"{R}.multi_turn.tool_config_path": "t.yaml"},
    ),
    (
        PPOConfig,
        {f"{R}.interaction_config_file": "i.yaml"},
        {f"{R}.multi_turn.interaction_config_path": "i.yaml"},
    ),
    (PPOConfig, {f"{R}.multi_turn": True}, {f"{R}.multi_turn.enable": True}),
    (PPOConfig, {f"{R}.mode": "sync"}, {f"{R}.mode": "async"}),
    # Off-policy correction.
    (
        PPOConfig,
        {f"{C}.rollout_rs_threshold_lower": 0.5, f"{C}.rollout_rs_threshold": 2.0},
        {f"{C}.rollout_rs_threshold": "0.5_2.0"},
    ),
    (
        PPOConfig,
        {f"{C}.rollout_rs_threshold_lower": 0.5},
        {f"{C}.rollout_rs_threshold": "0.5_2.0"},
    ),
    (PPOConfig, {f"{C}.rollout_token_veto_threshold": 1e-4}, {}),
    (
        PPOConfig,
        {f"{C}.use_policy_gradient": True},
        {f"{C}.bypass_mode": True, f"{C}.loss_type": "reinforce"},
    ),
    (PPOConfig, {f"{C}.rollout_rs": "token"}, {f"{C}.rollout_rs": "token_k1"}),
    (PPOConfig, {f"{C}.rollout_rs": "sequence"}, {f"{C}.rollout_rs": "seq_sum_k1"}),
    (PPOConfig, {f"{C}.rollout_rs": "geometric"}, {f"{C}.rollout_rs": "seq_mean_k1"}),
    (PPOConfig, {"algorithm.rollout_is": "token"}, {f"{C}.rollout_is": "token"}),
    (PPOConfig, {"algorithm.rollout_is_veto_threshold": 1e-4}, {}),
    (
        PPOConfig,
        {f"{A}.tis_imp_ratio_cap": 2.5},
        {f"{C}.rollout_is": "token", f"{C}.rollout_is_threshold": 2.5},
    ),
    (PPOConfig, {f"{A}.tis_imp_ratio_cap": -1}, {}),
    # Rewards.
    (
        PPOConfig,
        {"reward_model.overlong_buffer.len": 512},
        {"reward_model.reward_kwargs.overlong_buffer_cfg.len": 512},
    ),
    (PPOConfig, {"reward.reward_manager.name": "dapo"}, {"reward_manager.name": "dapo"}),
    (
        PPOConfig,
        {"reward.reward_kwargs.max_resp_len": 9},
        {"reward_model.reward_kwargs.max_resp_len": 9},
    ),
    (
        PPOConfig,
        {"reward.custom_reward_function.path": "r.py"},
        {"custom_reward_function.path": "r.py"},
    ),
    (PPOConfig, {"reward.reward_model.enable": True}, {"reward_model.enable": True}),
    (PPOConfig, {"reward.num_workers": 3}, {"reward_model.num_workers": 3}),
    (PPOConfig, {"reward.sandbox_fusion.url": "u"}, {"reward_model.sandbox_fusion.url": "u"}),
    # Actor and critic.
    (PPOConfig, {f"{A}.loss_mode": "gspo"}, {f"{A}.policy_loss.loss_mode": "gspo"}),
    (PPOConfig, {f"{A}.clip_cov_ratio": 0.5}, {f"{A}.policy_loss.clip_cov_ratio": 0.5}),
    (PPOConfig, {f"{A}.clip_cov_lb": 0.5}, {f"{A}.policy_loss.clip_cov_lb": 0.5}),
    (PPOConfig, {f"{A}.clip_cov_ub": 0.5}, {f"{A}.policy_loss.clip_cov_ub": 0.5}),
    (PPOConfig, {f"{A}.kl_cov_ratio": 0.5}, {f"{A}.policy_loss.kl_cov_ratio": 0.5}),
    (PPOConfig, {f"{A}.ppo_kl_coef": 0.5}, {f"{A}.policy_loss.ppo_kl_coef": 0.5}),
    (
        PPOConfig,
        {f"{A}.policy_loss.loss_mode": "clip-cov"},
        {f"{A}.policy_loss.loss_mode": "clip_cov"},
    ),
    (PPOConfig, {"trainer.save_freq": False}, {"trainer.save_freq": -1}),
    (SFTConfig, {"trainer.test_freq": False}, {"trainer.test_freq": -1}),
    (PPOConfig, {"trainer.tensorboard_dir": "logs"}, {}),
    (PPOConfig, {"trainer.rl_logging_board_dir": "logs"}, {}),
    (PPOConfig, {"reward_model.model.type": "discriminative"}, {}),
    (PPOConfig, {f"{R}.sglang_rollout_mode": "server"}, {}),
    (PPOConfig, {"actor_rollout_ref.model.torch_dtype": "bfloat16"}, {}),
    (PPOConfig, {f"{A}.optim.clip_grad": 0.5}, {f"{A}.grad_clip": 0.5}),
    (PPOConfig, {"critic.optim.clip_grad": 0.5}, {"critic.grad_clip": 0.5}),
    (PPOConfig, {"critic.optim.grad_clip": 0.5}, {"critic.grad_clip": 0.5}),
    (
        PPOConfig,
        {"critic.model.enable_activation_offloading": True},
        {"critic.model.enable_activation_offload": True},
    ),
    (PPOConfig, {f"{A}.peft.peft_type": "dora"}, {"actor_rollout_ref.model.peft_type": "dora"}),
    (PPOConfig, {f"{A}.optim.warmup_style": "cosine"}, {f"{A}.optim.lr_scheduler_type": "cosine"}),
    (
        PPOMegatronConfig,
        {f"{A}.optim.warmup_style": "cosine"},
        {f"{A}.optim.lr_decay_style": "cosine"},
    ),
    (SFTEngineConfig, {"optim.grad_clip": 0.3}, {"optim.clip_grad": 0.3}),
    (PPOMegatronConfig, {f"{A}.optim.min_lr_ratio": 0.1}, {f"{A}.optim.min_lr": 0.1 * 1e-6}),
    (
        PPOConfig,
        {f"{A}.checkpoint.contents": ["model"]},
        {f"{A}.checkpoint.save_contents": ["model"]},
    ),
    (PPOConfig, {f"{A}.fsdp_config.grad_offload": True}, {}),
    (
        PPOConfig,
        {"reward_model.model.fsdp_config.min_num_params": 7},
        {"reward_model.model.fsdp_config.wrap_policy.min_num_params": 7},
    ),
    (
        PPOMegatronConfig,
        {f"{A}.megatron.num_layers_per_virtual_pipeline_stage": 2},
        {f"{A}.megatron.virtual_pipeline_model_parallel_size": 2},
    ),
    (
        PPOMegatronConfig,
        {"actor_rollout_ref.ref.param_offload": True},
        {"actor_rollout_ref.ref.megatron.param_offload": True},
    ),
    (
        PPOMegatronConfig,
        {"reward_model.param_offload": True},
        {"reward_model.megatron.param_offload": True},
    ),
    (
        PPOMegatronConfig,
        {f"actor_rollout_ref.{RECOMPUTE}_method": "block"},
        {f"{A}.megatron.{FLAGS}.recompute_method": "block"},
    ),
    (
        PPOMegatronConfig,
        {"critic.model.gradient_checkpointing_kwargs.activations_checkpoint_granularity": "full"},
        {f"critic.megatron.{FLAGS}.recompute_granularity": "full"},
    ),
    (
        PPOMegatronConfig,
        {"critic.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers": 2},
        {f"critic.megatron.{FLAGS}.recompute_num_layers": 2},
    ),
    # Trainer, profiler, Ray.
    (PPOConfig, {"trainer.val_generations_to_log_to_wandb": 3}, {"trainer.log_val_generations": 3}),
    (
        PPOConfig,
        {"trainer.remove_previous_ckpt_in_save": True},
        {"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1},
    ),
    (PPOConfig, {"trainer.profile_steps": [1]}, {"global_profiler.steps": [1]}),
    (
        PPOConfig,
        {"trainer.controller_nsight_options.trace": "cuda"},
        {f"{NSYS}.controller_nsight_options.trace": "cuda"},
    ),
    (
        PPOConfig,
        {"trainer.worker_nsight_options.trace": "cuda"},
        {f"{NSYS}.worker_nsight_options.trace": "cuda"},
    ),
    (PPOConfig, {"actor_rollout_ref.profiler.all_ranks": True}, {f"{A}.profiler.all_ranks": True}),
    (
        PPOConfig,
        {"actor_rollout_ref.profiler.discrete": True},
        {f"{A}.profiler.tool_config.nsys.discrete": True},
    ),
    (PPOConfig, {f"{A}.profile.use_profile": True}, {f"{A}.profiler.enable": True}),
    (PPOConfig, {f"{A}.profile.profile_ranks": [0]}, {f"{A}.profiler.ranks": [0]}),
    (PPOConfig, {f"{A}.profile.step_start": 1}, {}),
    (PPOConfig, {f"{A}.profile.step_end": 1}, {}),
    (
        PPOConfig,
        {"actor_rollout_ref.ref.profile.save_path": "p"},
        {"actor_rollout_ref.ref.profiler.save_path": "p"},
    ),
    (PPOConfig, {f"{A}.profiler.tool_config.torch.step_start": 1}, {}),
    (PPOConfig, {f"{A}.profiler.tool_config.torch.step_end": 1}, {}),
    (PPOConfig, {"ray_init.num_cpus": 4}, {"ray_kwargs.ray_init.num_cpus": 4}),
    (PPOConfig, {"ray_init.timeline_json_file": "t"}, {"ray_kwargs.timeline_json_file": "t"}),
]


def by_path(values):
    return {tuple(key.split(".")): value for key, value in values.items()}


def load(root, values):
    return load_config(nested(by_path(values)), root)


@pytest.mark.parametrize(
    ("root", "old", "today"),
    CASES,
    ids=lambda value: next(iter(value), "-") if isinstance(value, dict) else value.__name__,
)
def test_an_old_key_means_the_same_today(root, old, today):
    forms = family(root)
    variant = forms.variants[0]
    modern = modernise(by_path(old), variant, forms.keys)
    assert modern.values == by_path(today)
    assert modern.faults == []
    assert len(modern.notices) == 1
    assert modern.notices[0].startswith(f"{next(iter(old))} ")
    assert all(key in modern.notices[0] for key in today)


def test_every_rule_has_a_case():
    keys = {key for _, old, _ in CASES for key in old}
    extra = {"algorithm.rollout_is_threshold", "algorithm.rollout_is_threshold_lower"}
    extra |= {"algorithm.rollout_is_level", "algorithm.rollout_is_mode"}
    heads = ("actor_rollout_ref", "critic")
    extra |= {f"{head}.{RECOMPUTE}_{name}" for head in heads for name in ("method", "num_layers")}
    extra |= {f"actor_rollout_ref.{RECOMPUTE}_granularity"}
    extra |= {entry.old for entry in ENTRIES}  # test_second_generation has them
    untested = [
        rule.old for rule in RULES if not any(rule.way_to(key) is not None for key in keys | extra)
    ]
    assert untested == []


def test_truncated_importance_weights_of_the_first_generation():
    loaded = load(
        PPOConfig,
        {
            "algorithm.rollout_is": True,
            "algorithm.rollout_is_threshold": 3.0,
            "algorithm.rollout_is_level": "sequence",
        },
    )
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("sequence", 3.0)
    assert correction.rollout_rs is None
    assert len(loaded.notices) == 3


def test_masked_importance_weights_of_the_first_generation_are_rejection():
    loaded = load(
        PPOConfig,
        {
            "algorithm.rollout_is_threshold": 4.0,
            "algorithm.rollout_is_threshold_lower": 0.5,
            "algorithm.rollout_is_level": "geometric",
            "algorithm.rollout_is_mode": "mask",
        },
    )
    correction = loaded.config.algorithm.rollout_correction
    assert correction.rollout_is is None
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("seq_mean_k1", "0.5_4.0")


def test_old_and_new_spelling_with_different_values_are_a_fault():
    loaded = load(PPOConfig, {"rollout.n": 4, "actor_rollout_ref.rollout.n": 8, "rollout.top_k": 5})
    assert [fault.text for fault in loaded.faults] == [
        "rollout.n is 4, which means actor_rollout_ref.rollout.n=4, but "
        "actor_rollout_ref.rollout.n is set too, to 8; remove one of the two"
    ]


def test_old_and_new_spelling_with_the_same_value_agree():
    loaded = load(PPOConfig, {"rollout.n": 8, "actor_rollout_ref.rollout.n": 8})
    assert loaded.faults == []
    assert loaded.config.actor_rollout_ref.rollout.n == 8


def test_the_command_line_wins_over_an_old_spelling_in_a_file():
    values = {"rollout": {"n": 4}, "actor_rollout_ref": {"rollout": {"n": 8}}}
    loaded = load_config(values, PPOConfig, overrides=["++actor_rollout_ref.rollout.n=8"])
    assert loaded.checked().actor_rollout_ref.rollout.n == 8


def test_a_dropped_key_says_why():
    loaded = load(PPOConfig, {f"{R}.chat_scheduler": "x"})
    assert loaded.notices == [
        f"{R}.chat_scheduler has no effect (agent loops took its place; "
        f"see {R}.agent.default_agent_loop)"
    ]


def test_a_key_that_the_root_has_itself_is_not_old():
    loaded = load(SFTConfig, {"optim.lr_scheduler": "wsd"})
    assert loaded.notices == []
    assert loaded.config.optim.lr_scheduler == "wsd"


def test_other_kinds_of_adapters_are_refused():
    loaded = load(PPOConfig, {f"{A}.peft.peft_type": "ia3"})
    (fault,) = absent_faults(loaded.config, loaded.user_set)
    assert fault.text.startswith('actor_rollout_ref.model.peft_type is "ia3"; LoRA is the only')
