"""Algorithms, the helpers of the training loop, rewards and configuration."""

TRAINING = {
    "verl.trainer.ppo.core_algos": """
        register_adv(_)
        register_adv_est(_)
        get_adv_estimator_fn(_)
        ADV_ESTIMATOR_REGISTRY
        register_policy_loss(name)
        get_policy_loss_fn(_)
        POLICY_LOSS_REGISTRY
        AdvantageEstimator
        AdvantageEstimator.GAE
        AdvantageEstimator.GRPO
        compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam)
        compute_grpo_outcome_advantage(
            token_level_rewards, response_mask, index, epsilon=1e-6,
            norm_adv_by_std_in_grpo=True, config=None
        )
        compute_grpo_vectorized_outcome_advantage(
            token_level_rewards, response_mask, index, epsilon=1e-6,
            norm_adv_by_std_in_grpo=True, config=None
        )
        compute_grpo_passk_outcome_advantage(token_level_rewards, response_mask, index)*
        compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask)*
        compute_reinforce_plus_plus_baseline_outcome_advantage(
            token_level_rewards, response_mask, index
        )*
        compute_remax_outcome_advantage(token_level_rewards, reward_baselines, response_mask)*
        compute_rloo_outcome_advantage(token_level_rewards, response_mask, index)*
        compute_rloo_vectorized_outcome_advantage(token_level_rewards, response_mask, index)*
        compute_opo_outcome_advantage(token_level_rewards, response_mask, index)*
        compute_gpg_outcome_advantage(token_level_rewards, response_mask, index)*
        agg_loss(
            loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None,
            global_batch_size=None, loss_scale_factor=None
        )
        compute_policy_loss(old_log_prob, log_prob, advantages, response_mask)*
        compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_gspo(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_sapo(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_gpg(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_clip_cov(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_kl_cov(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_geo_mean(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_cispo(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=...,
            rollout_is_weights=None
        )
        compute_policy_loss_reinforce(
            rollout_log_prob, log_prob, advantages, response_mask,
            loss_agg_mode="seq-mean-token-sum", config=..., rollout_is_weights=None
        )
        compute_value_loss(
            vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode="token-mean"
        )
        compute_entropy_loss(logits, response_mask, loss_agg_mode=...)
        compute_rewards(_, _, _, kl_ratio)
        kl_penalty(logprob, ref_logprob, kl_penalty)
        kl_penalty_forward(logprob, ref_logprob, kl_penalty)
        FixedKLController(kl_coef)
        FixedKLController.update(current_kl, n_steps)
        AdaptiveKLController(init_kl_coef, target_kl, horizon)
        AdaptiveKLController.update(current_kl, n_steps)
        get_kl_controller(kl_ctrl)
        compute_pf_ppo_reweight_data(data, reweight_method="pow", weight_pow=2.0)
    """,
    "verl.trainer.ppo.rollout_corr_helper": """
        SUPPORTED_ROLLOUT_RS_OPTIONS
        compute_rollout_correction_and_rejection_mask(
            old_log_prob, rollout_log_prob, response_mask, rollout_is=None,
            rollout_is_threshold=2.0, rollout_is_batch_normalize=False, rollout_rs=None,
            rollout_rs_threshold=None
        )
        compute_rollout_correction_weights
        compute_rollout_rejection_mask
        compute_offpolicy_metrics
        compute_rollout_correction_and_add_to_batch(batch, _)
        compute_rollout_corr_metrics_from_logprobs
        apply_bypass_mode(batch, _, policy_loss_config)
    """,
    "verl.trainer.ppo.ray_trainer": """
        AdvantageEstimator
        WorkerType
        compute_data_metrics(batch, use_critic=True)
        compute_throughout_metrics(batch, timing_raw, n_gpus)
        compute_timing_metrics(batch, timing_raw)
        marked_timer(name, timing_raw)
        pad_dataproto_to_divisor(data, size_divisor)
        reduce_metrics(metrics)
        unpad_dataproto(data, pad_size)
        compute_advantage(
            data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True,
            config=None
        )
        apply_kl_penalty(data, kl_ctrl, kl_penalty="kl")
        compute_response_mask(data)
        ResourcePoolManager
        Role
        RayPPOTrainer(
            config, tokenizer, role_worker_mapping, resource_pool_manager,
            ray_worker_group_cls=..., processor=None, reward_fn=None, val_reward_fn=None,
            train_dataset=None, val_dataset=None, collate_fn=None, train_sampler=None,
            device_name=None
        )
        RayPPOTrainer.init_workers()
        RayPPOTrainer.fit()
        RayPPOTrainer.config
        RayPPOTrainer.actor_rollout_wg
        RayPPOTrainer.critic_wg
        RayPPOTrainer.ref_policy_wg
        RayPPOTrainer.rm_wg
        RayPPOTrainer.async_rollout_manager
        RayPPOTrainer.async_rollout_mode
        RayPPOTrainer.checkpoint_manager
        RayPPOTrainer.global_steps
        RayPPOTrainer.total_training_steps
        RayPPOTrainer.train_dataloader
        RayPPOTrainer.val_dataloader
        RayPPOTrainer.train_dataset
        RayPPOTrainer.val_dataset
        RayPPOTrainer.tokenizer
        RayPPOTrainer.processor
        RayPPOTrainer.reward_fn
        RayPPOTrainer.val_reward_fn
        RayPPOTrainer.use_critic
        RayPPOTrainer.use_reference_policy
        RayPPOTrainer.use_rm
        RayPPOTrainer.ref_in_actor
        RayPPOTrainer.hybrid_engine
        RayPPOTrainer.kl_ctrl_in_reward
        RayPPOTrainer.resource_pool_manager
        RayPPOTrainer.role_worker_mapping
        RayPPOTrainer.ray_worker_group_cls
        RayPPOTrainer.device_name
        RayPPOTrainer.max_steps_duration
        RayPPOTrainer.validation_generations_logger
        RayPPOTrainer._load_checkpoint()
        RayPPOTrainer._save_checkpoint()
        RayPPOTrainer._validate()
        RayPPOTrainer._balance_batch(batch, metrics)
        RayPPOTrainer._start_profiling(do_profile)
        RayPPOTrainer._stop_profiling(do_profile)
        RayPPOTrainer._get_gen_batch(batch)
        RayPPOTrainer._log_rollout_data(batch, _, timing_raw, rollout_data_dir)
        RayPPOTrainer._dump_generations(inputs, outputs, gts, scores, _, dump_path)
        RayPPOTrainer._maybe_log_val_generations(inputs, outputs, scores)
        RayPPOTrainer._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
    """,
    "verl.trainer.ppo.metric_utils": """
        _compute_response_info(batch)
        compute_data_metrics(batch, use_critic=True)
        compute_timing_metrics(batch, timing_raw)
        compute_throughout_metrics(batch, timing_raw, n_gpus)
        compute_variance_proxy_metrics(batch)*
        bootstrap_metric(data, subset_size, reduce_fns, n_bootstrap=1000, seed=42)
        calc_maj_val(data, vote_key, val_key)
        process_validation_metrics(data_sources, sample_uids, infos_dict, seed=42)
        reduce_metrics(metrics)
    """,
    "verl.trainer.ppo.utils": """
        Role
        Role.Actor
        Role.Rollout
        Role.ActorRollout
        Role.Critic
        Role.RefPolicy
        Role.RewardModel
        Role.ActorRolloutRef
        Role.Env
        Role.from_string(name)
        WorkerType
        need_reference_policy(_)
        need_reward_model(_)
        need_critic(config)
    """,
    "verl.trainer.ppo.reward": """
        get_custom_reward_fn(config)
        load_reward_manager(config, tokenizer, num_examine)*
        compute_reward(data, reward_fn)
        compute_reward_async
        compute_reward_async.remote
    """,
    "verl.experimental.fully_async_policy.fully_async_main": "main(config)",
    "verl.experimental.one_step_off_policy.async_main_ppo": "main(config)",
    "verl.experimental.one_step_off_policy.main_ppo": "main(config)",
    "verl.experimental.transfer_queue.main_ppo": "main(config)",
    "verl.trainer.ppo.v1": """
        AgentLoopManagerTQ
        AgentLoopWorkerTQ
        PPOTrainer
        PPOTrainer.on_init_end()
        PPOTrainer.on_train_begin()
        PPOTrainer.on_train_end()
        PPOTrainer.on_validate_begin()
        PPOTrainer.on_validate_end()
        PPOTrainer.on_step_begin()
        PPOTrainer.on_step_end()
        PPOTrainer.on_sample_begin()
        PPOTrainer.on_sample_end()
        PPOTrainerSync
        PPOTrainerColocateAsync
        PPOTrainerSeparateAsync
        register_trainer(_)
        get_trainer_cls(_)
    """,
    "verl.trainer.main_ppo": """
        main(config)
        TaskRunnerV1()
        run_ppo(config, task_runner_class=None)
        TaskRunner()
        TaskRunner.role_worker_mapping
        TaskRunner.mapping
        TaskRunner.run(config)
        TaskRunner.add_actor_rollout_worker(config)
        TaskRunner.add_critic_worker(config)
        TaskRunner.add_reward_model_worker(config)
        TaskRunner.add_ref_policy_worker(config, ref_policy_cls)
        TaskRunner.init_resource_pool_mgr(config)
        create_rl_dataset(
            data_paths, data_config, tokenizer, processor, is_train=True, max_samples=-1
        )
        create_rl_sampler(data_config, dataset)
    """,
    "verl.trainer.constants_ppo": """
        PPO_RAY_RUNTIME_ENV
        get_ppo_ray_runtime_env()
    """,
    "verl.trainer.fsdp_sft_trainer": """
        main
    """,
    "verl.trainer.sft_trainer": """
        main
    """,
    "verl.trainer.sft_trainer_ray": """
        main
    """,
    "verl.trainer.main_generation": """
        main(config=...)
    """,
    "verl.trainer.main_generation_server": """
        main(config=...)
    """,
    "verl.trainer.main_eval": """
        main(config)
    """,
    "verl.workers.rollout.base": """
        BaseRollout(config, model_config, device_mesh=...)
        BaseRollout.resume(tags)
        BaseRollout.update_weights(weights)
        BaseRollout.release()
        get_rollout_class(_, mode="async")
    """,
    "verl.workers.rollout.replica": """
        RolloutReplica(
            replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False
        )
        RolloutReplica.init_hybrid(worker_group)
        RolloutReplica.init_standalone()
        RolloutReplica.sleep()
        RolloutReplica.wake_up()
        RolloutReplica.clear_kv_cache()
        RolloutReplica.abort_all_requests()
        RolloutReplica.server_handle
        RolloutReplicaRegistry.register(name, loader)
        get_rollout_replica_class(_)
        RolloutMode.HYBRID
        RolloutMode.COLOCATED
        RolloutMode.STANDALONE
        TokenOutput
    """,
    "verl.model_merger": """
        ModelMergerConfig
        FSDPModelMerger
        FSDPModelMerger.merge_and_save()
        FSDPModelMerger.cleanup()
        MegatronModelMerger.merge_and_save()
        MegatronModelMerger.cleanup()
    """,
    "verl.utils.checkpoint.fsdp_checkpoint_manager": """
        FSDPCheckpointManager(
            model, optimizer, lr_scheduler=None, processing_class=None, checkpoint_config=None
        )
    """,
    "verl.utils.checkpoint.megatron_checkpoint_manager": """
        MegatronCheckpointManager(
            model, optimizer, lr_scheduler=None, processing_class=None, checkpoint_config=None
        )
    """,
    "verl.utils.megatron_utils": """
        load_library()
    """,
    "verl.workers.megatron_workers": """
        ActorRolloutRefWorker(config, role)
        AsyncActorRolloutRefWorker(config, role)
        CriticWorker(config)
        RewardModelWorker
    """,
    "verl.utils.checkpoint.checkpoint_manager": """
        BaseCheckpointManager(
            model, optimizer, lr_scheduler=None, processing_class=None, checkpoint_config=None
        )
        BaseCheckpointManager.ensure_checkpoint_capacity(_)
        BaseCheckpointManager.register_checkpoint(_, _)
        should_save_ckpt_esi(max_steps_duration, save_ckpt_duration=60, redundant_time=0)
        find_latest_ckpt_path(path, directory_format=...)
        get_checkpoint_tracker_filename(_)
    """,
    "verl.utils.dataset.dataset_utils": """
        DatasetPadMode.RIGHT
        DatasetPadMode.LEFT_RIGHT
        DatasetPadMode.NO_PADDING
        SFTTensorCollator(pad_mode=...)
    """,
    "verl.utils.dataset.multiturn_sft_dataset": """
        MultiTurnSFTDataset(parquet_files, tokenizer, config, processor=None, max_samples=-1)
    """,
    "verl.utils.dataset.rm_dataset": """
        RMDataset(
            parquet_files, tokenizer, prompt_key=..., chosen_key=..., rejected_key=...,
            max_length=1024, add_eos=True
        )
    """,
    "verl.utils.dataset.sft_dataset": """
        SFTDataset(parquet_files, tokenizer, config, max_samples=-1)
    """,
    "verl.workers.engine": """
        EngineRegistry
        EngineRegistry.register(model_type, backend, device=...)
        BaseEngine
        BaseEngine.initialize()
        BaseEngine.lr_scheduler_step()
        BaseEngine.get_per_tensor_param()
        BaseEngine.get_data_parallel_size()
        BaseEngine.get_data_parallel_rank()
        BaseEngine.get_data_parallel_group()
        BaseEngine.is_mp_src_rank_with_outputs()
        BaseEngine.disable_adapter()
    """,
    "verl.workers.fsdp_workers": """
        create_device_mesh(world_size, fsdp_size)
        get_sharding_strategy(device_mesh)
        AsyncActorRolloutRefWorker(config, role)
        ActorRolloutRefWorker(config, role)
        ActorRolloutRefWorker.generate_sequences(prompts)
        ActorRolloutRefWorker.update_weights()
        ActorRolloutRefWorker.start_profile()*
        ActorRolloutRefWorker.stop_profile()
        ActorRolloutRefWorker.init_model()
        ActorRolloutRefWorker.update_actor(data)
        ActorRolloutRefWorker.compute_log_prob(data)
        ActorRolloutRefWorker.compute_ref_log_prob(data)
        ActorRolloutRefWorker.save_checkpoint(
            local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None
        )
        ActorRolloutRefWorker.load_checkpoint(
            local_path, hdfs_path=None, del_local_after_load=False
        )
        CriticWorker(config)
        CriticWorker.init_model()
        CriticWorker.compute_values(data)
        CriticWorker.update_critic(data)
        CriticWorker.save_checkpoint(
            local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None
        )
        CriticWorker.load_checkpoint(
            local_path, hdfs_path=None, del_local_after_load=False
        )
        RewardModelWorker(config)
        RewardModelWorker.init_model()
        RewardModelWorker.compute_rm_score(data)
    """,
    "verl.workers.reward_manager": """
        register(name)
        get_reward_manager_cls(name)
        NaiveRewardManager(tokenizer, num_examine, compute_score=..., reward_fn_key="data_source")
        DAPORewardManager(tokenizer, num_examine, compute_score=..., reward_fn_key="data_source")*
        BatchRewardManager(tokenizer, num_examine, compute_score, reward_fn_key="data_source")*
        PrimeRewardManager(tokenizer, num_examine, compute_score=..., reward_fn_key="data_source")*
        RateLimitedRewardManager
    """,
    "verl.workers.reward_manager.prime": """
        parallel_compute_score_async(
            evaluation_func, completions, references, tasks, extra_info=None, num_processes=64
        )
    """,
    "verl.workers.reward_manager.registry": """
        REWARD_MANAGER_REGISTRY
        register(name)
        get_reward_manager_cls(name)
    """,
    "verl.workers.reward_manager.abstract": """
        AbstractRewardManager(
            tokenizer, num_examine, compute_score, reward_fn_key="data_source"
        )*
        AbstractRewardManager.__call__(data, return_dict=False)
    """,
    "verl.trainer.config": """
        AlgoConfig
        KLControlConfig
        FilterGroupsConfig
        RolloutCorrectionConfig
        CheckpointConfig
        ProfileConfig
        BaseModelConfig
    """,
    "verl.trainer.config.config": """
        ModuleConfig
        RewardManagerConfig
        CheckpointConfig
        ProfileConfig
        BaseModelConfig
    """,
    "verl.trainer.config.algorithm": """
        AlgoConfig
        KLControlConfig
        FilterGroupsConfig
        RolloutCorrectionConfig
        RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)
        RolloutCorrectionConfig.decoupled_seq_is(threshold=2.0)
        RolloutCorrectionConfig.decoupled_seq_is_rs
        RolloutCorrectionConfig.decoupled_geo_rs
        RolloutCorrectionConfig.decoupled_geo_rs_seq_tis
        RolloutCorrectionConfig.decoupled_geo_rs_token_tis
        RolloutCorrectionConfig.decoupled_k3_rs
        RolloutCorrectionConfig.decoupled_k3_rs_seq_tis
        RolloutCorrectionConfig.decoupled_k3_rs_token_tis
        RolloutCorrectionConfig.bypass_ppo_clip()
        RolloutCorrectionConfig.bypass_ppo_clip_geo_rs
        RolloutCorrectionConfig.bypass_ppo_clip_k3_rs
        RolloutCorrectionConfig.bypass_pg_is
        RolloutCorrectionConfig.bypass_pg_geo_rs
        RolloutCorrectionConfig.bypass_pg_geo_rs_seq_tis
        RolloutCorrectionConfig.bypass_pg_geo_rs_token_tis
        RolloutCorrectionConfig.disabled()
    """,
    "verl.workers.config": """
        ActorConfig
        FSDPActorConfig
        McoreActorConfig
        PolicyLossConfig
        RouterReplayConfig
        CriticConfig
        FSDPCriticConfig
        McoreCriticConfig
        FSDPCriticModelCfg
        EngineConfig
        FSDPEngineConfig
        McoreEngineConfig
        VeOmniEngineConfig
        TrainingWorkerConfig
        HFModelConfig
        MtpConfig
        OptimizerConfig
        FSDPOptimizerConfig
        McoreOptimizerConfig
        VeOmniOptimizerConfig
        build_optimizer
        RewardModelConfig
        SandboxFusionConfig
        RolloutConfig
        SamplingConfig
        MultiTurnConfig
        AgentLoopConfig
        CustomAsyncServerConfig
        TraceConfig
        ServerConfig
        PrometheusConfig
        CheckpointEngineConfig
    """,
    "verl.workers.config.actor": "ActorConfig",
    "verl.workers.config.engine": """
        FSDPEngineConfig
        McoreEngineConfig
    """,
    "verl.workers.config.optimizer": "FSDPOptimizerConfig",
    "verl.utils.config": """
        omega_conf_to_dataclass(config, dataclass_type=None)
        validate_config(config, use_reference_policy, use_critic)
    """,
}
