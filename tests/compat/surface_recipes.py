"""What users' documentation and third-party programs import beyond the tables beside this one."""

RECIPES = {
    "verl.model_engine.base": "BaseEngine",
    "verl.models.transformers.monkey_patch": "apply_monkey_patch(model, ulysses_sp_size=1)",
    "verl.models.transformers.qwen2_vl": """
        get_rope_index(
            processor, input_ids, image_grid_thw=None, video_grid_thw=None,
            second_per_grid_ts=None, attention_mask=None
        )
    """,
    "verl.third_party.vllm": "VLLM_SLEEP_LEVEL",
    "verl.trainer.fsdp.fsdp_engine": "FSDPEngine",
    "verl.trainer.fsdp.hybrid_engine": """
        HybridEngine.wake_up()
        HybridEngine.sleep()
    """,
    "verl.trainer.megatron.megatron_engine": "MegatronEngine",
    "verl.trainer.fsdp_sft_trainer": """
        FSDPSFTTrainer(
            config, device_mesh=None, ulysses_device_mesh=None, tokenizer=None,
            train_dataset=None, val_dataset=None
        )
        create_sft_dataset(data_paths, data_config, tokenizer, max_samples=-1)
    """,
    "verl.utils.activation_offload": "enable_activation_offloading(model, strategy=...)",
    "verl.utils.attention_utils": """
        index_first_axis(_, _)
        pad_input(hidden_states, indices, batch, seqlen)
        rearrange(tensor, pattern)
        unpad_input(hidden_states, attention_mask)
    """,
    "verl.utils.debug.performance": "marked_timer(name, timing_raw)",
    "verl.utils.dataset.vision_utils": """
        process_image(image, image_patch_size=14)
        process_video(video, image_patch_size=14, nframes=None, fps=None)
    """,
    "verl.utils.fsdp_utils": """
        CPUOffloadPolicy
        MixedPrecisionPolicy
        apply_fsdp2(model, fsdp_kwargs, config)
        collect_lora_params(module, layered_summon=..., base_sync_done=...)
        fsdp2_clip_grad_norm_(parameters, max_norm)
        fsdp2_load_full_state_dict(model, full_state, device_mesh=None, cpu_offload=None)
        fsdp_version(model)
        get_fsdp_wrap_policy(module, config=None, is_lora=False)
        get_init_weight_context_manager(use_meta_tensor=True, mesh=None)
        get_shard_placement_fn(fsdp_size)
        init_fn(_)
        layered_summon_lora_params(fsdp_module)
        load_fsdp_model_to_gpu(model)
        load_fsdp_optimizer(optimizer, device_id)
        offload_fsdp_model_to_cpu(model, empty_cache=True)
        offload_fsdp_optimizer(optimizer)
        replace_lora_wrapper(k, peft_config)
    """,
    "verl.utils.memory_utils": "aggressive_empty_cache(force_sync=True)",
    "verl.utils.net_utils": """
        get_free_port(address)
        is_valid_ipv6_address(address)
    """,
    "verl.utils.profiler.performance": """
        log_gpu_memory_usage(head)*
        marked_timer(name, timing_raw)
        reduce_timing(timing_raw)
        simple_timer(name, timing_raw)
        topk_reduce_ratio_min_max(timing)
    """,
    "verl.utils.reward_score.prime_code.testing_util": "run_test(in_outs, test=None, debug=False)",
    "verl.utils.trainer.core_algos": """
        register_adv(_)
        AdvantageEstimator
    """,
    "verl.utils.transferqueue_utils": """
        create_transferqueue_client
        get_transferqueue_client
        tqbridge()
    """,
    "verl.utils.ulysses": """
        gather_outputs_and_unpad(x, gather_dim, unpad_dim=None, padding_size=0)
        get_ulysses_sequence_parallel_group()
        get_ulysses_sequence_parallel_rank(group=None)
        get_ulysses_sequence_parallel_world_size(group=None)
        set_ulysses_sequence_parallel_group(group)
        ulysses_pad(input_ids_rmpad, position_ids_rmpad=None, sp_size=1)
        ulysses_pad_and_slice_inputs(input_ids_rmpad, position_ids_rmpad=None, sp_size=1)
    """,
    "verl.utils.vllm.patch": "patch_vllm_moe_model_weight_loader(model)",
    "verl.workers.engine_workers": "ActorRolloutRefWorker.dump_memory_snapshot(tag, sub_dir=None)",
    "verl.workers.rollout": "get_rollout_class(rollout_name, mode=...)",
    "verl.workers.rollout.async_server": "RolloutReplica",
    "verl.workers.rollout.sglang": "SGLangRollout(config, model_config, device_mesh)",
    "verl.workers.rollout.sglang_rollout": "SGLangRollout(config, model_config, device_mesh)",
    "verl.workers.rollout.sglang_rollout.sglang_rollout": "SGLangRollout(config, model_config)",
    "verl.workers.rollout.vllm": "vLLMRollout(config, model_config, device_mesh)",
    "verl.workers.rollout.vllm_rollout": "vLLMRollout(config, model_config, device_mesh)",
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd": "vLLMRollout(config, model_config)",
    "verl.workers.sharding_manager.fsdp_ulysses": "FSDPUlyssesShardingManager(device_mesh)",
    "verl.workers.utils.padding": """
        left_right_2_no_padding(data)
        no_padding_2_padding(nested_tensor, data)
    """,
}
