"""Commands in the style of the examples and recipes that users start from.

A command is the module and its arguments as a shell gives them. `REFUSED` has those that ask for a
part that is not built, with a piece of the message that names it.
"""

# ruff: noqa: E501

DATA = """
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation='error'
"""
ACTOR = """
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
"""
VLLM = """
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
"""
SGLANG = VLLM.replace("name=vllm", "name=sglang")
REFERENCE = """
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=True
"""
KL_LOSS = """
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
    algorithm.use_kl_in_reward=False
"""
TRAINER = """
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name='verl_example'
    trainer.experiment_name='qwen2_7b' trainer.n_gpus_per_node=8 trainer.nnodes=1
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
BASE = DATA + ACTOR + VLLM + TRAINER
GRPO = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 "
    + DATA + ACTOR + VLLM + KL_LOSS + REFERENCE + TRAINER
)  # fmt: skip
CRITIC = """
    critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.optim.lr_warmup_steps_ratio=0.05
    critic.model.path=Qwen/Qwen2-7B-Instruct critic.model.enable_gradient_checkpointing=True
    critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False
    critic.model.fsdp_config.optimizer_offload=False
"""
DAPO = """
    data.train_files=$HOME/data/dapo-math-17k.parquet data.val_files=$HOME/data/aime-2024.parquet
    data.prompt_key=prompt data.truncation='left' data.max_prompt_length=2048
    data.max_response_length=20480 data.gen_batch_size=1536 data.train_batch_size=512
    actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0 actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10
    algorithm.filter_groups.metric=acc actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=22528
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=22528
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B +actor_rollout_ref.model.override_config.attention_dropout=0.
    +actor_rollout_ref.model.override_config.embd_pdrop=0.
    +actor_rollout_ref.model.override_config.resid_pdrop=0.
    actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.max_num_batched_tokens=22528 actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.top_k=-1
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 actor_rollout_ref.rollout.name=vllm
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=4096 reward_model.overlong_buffer.penalty_factor=1.0
    trainer.logger='["console","wandb"]' trainer.project_name=DAPO trainer.experiment_name=32b
    trainer.n_gpus_per_node=8 trainer.nnodes=16 trainer.val_before_train=True trainer.test_freq=5
    trainer.save_freq=5 trainer.total_epochs=1 trainer.resume_mode=auto
"""
MULTI_TURN = """
    data.return_raw_chat=True actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/gsm8k_tool_config.yaml
    actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.mode=async
    +trainer.agent_note=mine
"""
SFT_DATA = """
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    trainer.project_name=gsm8k-sft trainer.experiment_name=sft trainer.total_epochs=2
    trainer.logger='["console","wandb"]' trainer.default_local_dir=checkpoints/sft
"""

ACCEPTED = {
    "PPO with a critic": f"main_ppo algorithm.adv_estimator=gae {BASE} {CRITIC}",
    "PPO with KL in the reward": (
        f"main_ppo algorithm.adv_estimator=gae {BASE} {CRITIC} algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_penalty=kl " + REFERENCE
    ),
    "PPO with a reward model": (
        f"main_ppo algorithm.adv_estimator=gae {BASE} {CRITIC} reward_model.enable=True "
        "reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 reward_model.micro_batch_size_per_gpu=32 "
        "reward_model.model.use_remove_padding=True reward_model.model.fsdp_config.param_offload=True"
    ),
    "PPO of an older script": (
        f"main_ppo algorithm.adv_estimator=gae {BASE} {CRITIC} actor_rollout_ref.rollout.mode=sync "
        "actor_rollout_ref.actor.checkpoint.contents='[model,optimizer,extra]' "
        "trainer.val_generations_to_log_to_wandb=1 actor_rollout_ref.actor.optim.warmup_style=cosine"
    ),
    "GRPO": f"main_ppo {GRPO}",
    "GRPO on SGLang": f"main_ppo {GRPO} {SGLANG} actor_rollout_ref.rollout.multi_stage_wake_up=True",
    "GRPO of 0.9": (
        f"main_ppo {GRPO} reward.reward_manager.name=naive reward.custom_reward_function.path=null "
        "trainer.use_v1=True trainer.v1.trainer_mode=sync reward.num_workers=4 "
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
    ),
    "Dr.GRPO": (
        f"main_ppo {GRPO} algorithm.norm_adv_by_std_in_grpo=False "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
        "actor_rollout_ref.actor.use_kl_loss=False"
    ),
    "GRPO with values that an unset variable leaves": (
        f"main_ppo {GRPO} custom_reward_function.name=null actor_rollout_ref.actor.optim.lr_warmup_steps=null "
        "trainer.test_freq=False trainer.save_freq=False data.return_raw_chat= "
        "actor_rollout_ref.actor.use_kl_loss= reward_model.model.type=x "
        "trainer.tensorboard_dir=logs trainer.rl_logging_board_dir=logs"
    ),
    "GRPO with a reward function": (
        f"main_ppo {GRPO} custom_reward_function.path=my/reward.py "
        "custom_reward_function.name=compute_score +custom_reward_function.reward_kwargs.scale=2"
    ),
    "GRPO with parameters on the host": (
        f"main_ppo {GRPO} actor_rollout_ref.rollout.name=native trainer.n_gpus_per_node=1 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
        "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    ),
    "GRPO with sequence parallelism": (
        f"main_ppo {GRPO} actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 "
        "actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000"
    ),
    "GRPO with FSDP2": (
        f"main_ppo {GRPO} actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 "
        "actor_rollout_ref.actor.fsdp_config.forward_prefetch=True critic.strategy=fsdp2"
    ),
    "GRPO with LoRA": (
        f"main_ppo {GRPO} actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 "
        "actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.rollout.load_format=safetensors "
        "actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.model.use_shm=True"
    ),
    "GRPO with profiling": (
        f"main_ppo {GRPO} global_profiler.tool=nsys global_profiler.steps='[1,2]' "
        "actor_rollout_ref.actor.profiler.enable=True actor_rollout_ref.actor.profiler.all_ranks=True"
    ),
    "GRPO with rollout correction": (
        f"main_ppo {GRPO} actor_rollout_ref.rollout.calculate_log_probs=True "
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 "
        "algorithm.rollout_correction.bypass_mode=True "
        "algorithm.rollout_correction.rollout_is_batch_normalize=True"
    ),
    "GRPO of a mixture of experts on FSDP": (
        f"main_ppo {GRPO} actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8 "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_expert_parallel=True"
    ),
    "DAPO": f"main_ppo {DAPO}",
    "DAPO as a recipe": f"recipe.dapo.main_dapo {DAPO}",
    "GSPO": (
        f"main_ppo {GRPO} actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
        "actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    ),
    "GPG": f"main_ppo {GRPO} algorithm.adv_estimator=gpg actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
    "Clip-Cov": f"main_ppo {GRPO} actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov",
    "RLOO": f"main_ppo {GRPO} algorithm.adv_estimator=rloo actor_rollout_ref.actor.use_kl_loss=False",
    "REINFORCE++": f"main_ppo {GRPO} algorithm.adv_estimator=reinforce_plus_plus",
    "REINFORCE++ with a baseline": (
        f"main_ppo {GRPO} algorithm.adv_estimator=reinforce_plus_plus_baseline"
    ),
    "ReMax": f"main_ppo {GRPO} algorithm.adv_estimator=remax actor_rollout_ref.rollout.n=1",
    "OPO": f"main_ppo {GRPO} algorithm.adv_estimator=opo actor_rollout_ref.actor.use_kl_loss=False",
    "multi-turn with tools": f"main_ppo {GRPO} {SGLANG} {MULTI_TURN}",
    "multi-turn of an older script": (
        f"main_ppo {GRPO} {SGLANG} {MULTI_TURN} actor_rollout_ref.rollout.multi_turn.max_turns=5 "
        "+actor_rollout_ref.rollout.sglang_rollout_mode=async "
        "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side=middle"
    ),
    "multi-turn with an agent loop": (
        f"main_ppo {GRPO} {MULTI_TURN} actor_rollout_ref.rollout.agent.num_workers=8 "
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    ),
    "multi-turn with a simulated user": (
        f"main_ppo {GRPO} {SGLANG} {MULTI_TURN} "
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path=interactions.yaml "
        "actor_rollout_ref.rollout.multi_turn.max_user_turns=3"
    ),
    "vision": (
        f"main_ppo {GRPO} data.image_key=images actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct "
        "actor_rollout_ref.actor.freeze_vision_tower=True "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True"
    ),
    "one step off": (
        f"experimental.one_step_off_policy.main_ppo {GRPO} actor_rollout_ref.hybrid_engine=False "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
        "trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2 data.train_batch_size=96 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=24 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5"
    ),
    "fully asynchronous": (
        f"experimental.fully_async_policy.fully_async_main {GRPO} actor_rollout_ref.hybrid_engine=False "
        "trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 data.train_batch_size=0 "
        "data.gen_batch_size=1 rollout.total_rollout_steps=1024 actor_rollout_ref.actor.ppo_mini_batch_size=32 "
        "async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=4 "
        "async_training.require_batches=4 async_training.partial_rollout=True "
        "actor_rollout_ref.rollout.calculate_log_probs=True async_training.use_rollout_log_probs=True"
    ),
    "SFT": (
        f"fsdp_sft_trainer {SFT_DATA} data.prompt_key=extra_info data.response_key=extra_info "
        "optim.lr=1e-4 data.prompt_dict_keys='[question]' +data.response_dict_keys='[answer]' "
        "data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
        "trainer.default_hdfs_dir=null"
    ),
    "SFT with LoRA": (
        f"fsdp_sft_trainer {SFT_DATA} model.partial_pretrain=google/gemma-2b-it model.lora_rank=32 "
        "model.lora_alpha=16 model.target_modules=all-linear data.prompt_key=question data.response_key=answer"
    ),
    "SFT with sequence parallelism": (
        f"fsdp_sft_trainer {SFT_DATA} model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
        "ulysses_sequence_parallel_size=2 use_remove_padding=true data.micro_batch_size=8 "
        "model.use_liger=True data.prompt_key=question data.response_key=answer"
    ),
    "SFT of conversations": (
        f"fsdp_sft_trainer {SFT_DATA} model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
        "data.multiturn.enable=true data.multiturn.messages_key=messages data.multiturn.tools_key=tools "
        "data.max_length=8192 data.truncation=error data.micro_batch_size_per_gpu=4 "
        "optim.warmup_steps_ratio=0.1"
    ),
    "SFT with an engine": (
        f"sft_trainer {SFT_DATA} engine=fsdp optim=fsdp model.path=Qwen/Qwen2.5-0.5B "
        "data.messages_key=messages data.train_batch_size=256 data.max_length=2048 "
        "data.pad_mode=no_padding data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192 "
        "engine.strategy=fsdp2 engine.ulysses_sequence_parallel_size=2 optim.lr=2e-5 "
        "optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 optim.betas='[0.9,0.95]' "
        "optim.clip_grad=1.0 optim.min_lr_ratio=0.1 optim.warmup_style=cosine"
    ),
    "SFT on Megatron": (
        f"sft_trainer {SFT_DATA} engine=megatron optim=megatron model.path=Qwen/Qwen2.5-0.5B "
        "engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=1 "
        "optim.lr_warmup_steps=10 optim.lr_decay_style=cosine"
    ),
    "Megatron beside a critic": (
        f"main_ppo {DATA} {TRAINER} actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct "
        "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
        "critic.megatron.tensor_model_parallel_size=4 "
        "critic.megatron.pipeline_model_parallel_size=2 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
    ),
    "GRPO on Megatron": (
        f"main_ppo --config-name=ppo_megatron_trainer.yaml {DATA} {KL_LOSS} {TRAINER} "
        "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"
    ),
    "GRPO of a mixture of experts on Megatron": (
        f"main_ppo --config-name=ppo_megatron_trainer {DATA} {TRAINER} "
        "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 "
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 "
        "actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.rollout.name=vllm"
    ),
    "generation": (
        "main_generation trainer.nnodes=1 trainer.n_gpus_per_node=8 data.path=$HOME/data/test.parquet "
        "data.prompt_key=prompt data.n_samples=1 data.output_path=$HOME/data/out.parquet "
        "model.path=deepseek-ai/deepseek-llm-7b-chat +model.trust_remote_code=True "
        "rollout.temperature=1.0 rollout.top_k=50 rollout.top_p=0.7 rollout.prompt_length=2048 "
        "rollout.response_length=1024 rollout.tensor_model_parallel_size=2 "
        "rollout.gpu_memory_utilization=0.8"
    ),
    "generation on two nodes": (
        "main_generation trainer.nnodes=2 trainer.n_gpus_per_node=8 data.path=$HOME/data/test.parquet "
        "data.output_path=out.parquet model.path=deepseek-ai/deepseek-llm-7b-chat "
        "rollout.tensor_model_parallel_size=8"
    ),
    "generation by a server": (
        "main_generation_server trainer.nnodes=1 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=0.7 "
        "data.train_files=$HOME/data/test.parquet data.prompt_key=prompt +data.output_path=out.parquet"
    ),
    "evaluation": (
        "main_eval data.path=$HOME/data/out.parquet data.prompt_key=prompt data.response_key=responses "
        "custom_reward_function.path=my/reward.py custom_reward_function.name=reward_func"
    ),
}

REFUSED = {
    "GRPO on TensorRT": (f"main_ppo {GRPO} actor_rollout_ref.rollout.name=trtllm", "trtllm"),
    "generation with an engine across nodes": (
        "main_generation trainer.nnodes=2 trainer.n_gpus_per_node=8 data.path=$HOME/data/test.parquet "
        "data.output_path=out.parquet model.path=deepseek-ai/deepseek-llm-7b-chat "
        "rollout.tensor_model_parallel_size=16",
        "must divide trainer.n_gpus_per_node (8)",
    ),
}
