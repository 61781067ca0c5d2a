"""Everything else under `verl.utils`."""

UTILITIES = {
    "verl.utils": """
        as_torch_index
        group_mean_std
        hf_processor
        hf_tokenizer(name_or_path, correct_pad_token=True, correct_gemma2=True)*
        omega_conf_to_dataclass(config, dataclass_type=None)
        tensordict_utils
    """,
    "verl.utils.import_utils": """
        load_module(path)*
        load_extern_object(module_path, object_name)
        load_extern_type
        load_class_from_fqn(fqn, description)
        import_external_libs(external_libs)
        deprecated(replacement)
        is_vllm_available()
        is_sglang_available()
        is_megatron_core_available()
        is_trl_available()
        is_nvtx_available()
    """,
    "verl.utils.py_functional": """
        append_to_dict(data, _, prefix="")
        union_two_dict(_, _)
        rename_dict
        timeout_limit(seconds, use_signals=False)
        temp_env_var(key, value)
        NestedNamespace
        DynamicEnum
        convert_to_regular_types(_)
    """,
    "verl.utils.fs": """
        copy(src, dst)
        makedirs(name)
        copy_to_local(
            src, cache_dir=None, filelock=".file.lock", verbose=False, always_recopy=False,
            use_shm=False
        )
        copy_local_path_from_hdfs
        is_non_local(path)
        local_mkdir_safe(path)
    """,
    "verl.utils.hdfs_io": """
        exists
        makedirs
        copy
    """,
    "verl.utils.device": """
        auto_set_ascend_device_name(config)
        get_device_name()
        get_nccl_backend()
        get_torch_device()
        get_device_id()
        get_visible_devices_keyword()
        get_device_capability
        auto_set_device(config)
        is_cuda_available
        is_npu_available
        set_expandable_segments(enable)
    """,
    "verl.utils.model": """
        compute_position_id_with_mask(_)
        update_model_config(_, _)
        create_random_mask
        get_generation_config
        print_model_size
        convert_weight_keys
        extract_multi_modal_inputs
    """,
    "verl.utils.groupwise": """
        as_torch_index
        group_mean_std
    """,
    "verl.utils.seqlen_balancing": """
        karmarkar_karp(seqlen_list, k_partitions, equal_size)
        greedy_partition(seqlen_list, k_partitions, equal_size)
        get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)
        rearrange_micro_batches(
            batch, max_token_len, dp_group=None, num_batches_divided_by=None,
            same_micro_num_in_dp=True, min_num_micro_batch=None, use_dynamic_bsz_balance=True
        )
        get_reverse_idx(_)
        prepare_dynamic_batch(data, max_token_len)*
        restore_dynamic_batch(data, batch_idx_list)
        get_group_balanced_partitions
        log_seqlen_unbalance
        calculate_workload
        ceildiv(_, _)
        roundup_divisible(_, _)
    """,
    "verl.utils.torch_functional": """
        logprobs_from_logits(logits, labels)*
        entropy_from_logits(logits)
        entropy_from_logits_with_chunking(logits)*
        masked_mean(values, mask, axis=None)
        masked_sum(values, mask, axis=None)
        masked_var(values, mask, unbiased=True)
        masked_whiten(values, mask, shift_mean=True)
        get_response_mask
        pad_sequence_to_length
        pad_2d_list_to_length
        postprocess_data
        tokenize_and_postprocess_data
        get_cosine_schedule_with_warmup
        get_constant_schedule_with_warmup
        get_wsd_schedule_with_warmup
        distributed_mean_max_min_std
        distributed_masked_mean
        expand_as_nested
    """,
    "verl.utils.flops_counter": """
        FlopsCounter(config)
        FlopsCounter.estimate_flops(batch_seqlens, delta_time)*
    """,
    "verl.utils.ray_utils": """
        parallel_put
        get_event_loop
        auto_await
    """,
    "verl.utils.distributed": "",
    "verl.utils.metric": """
        reduce_metrics(metrics)
        Metric
        AggregationType
    """,
    "verl.utils.metric.utils": """
        AggregationType
        AggregationType.MEAN
        AggregationType.SUM
        AggregationType.MIN
        AggregationType.MAX
        Metric(aggregation, value=None)
    """,
    "verl.utils.tracking": """
        Tracking(project_name, experiment_name, default_backend="console", config=None)
        Tracking.log(data, step, backend=None)
        ValidationGenerationsLogger(project_name=..., experiment_name=...)
        ValidationGenerationsLogger.log(loggers, samples, step)
        _MlflowLoggingAdapter()
        _MlflowLoggingAdapter.log(data, step)
    """,
    "verl.utils.profiler": """
        ProfilerConfig
        ProfilerConfig.union(other)
        ProfilerConfig.intersect(other)
        DistProfiler
        DistProfilerExtension
        log_gpu_memory_usage(head, logger=None)*
        GPUMemoryLogger(role, logger=None)*
        simple_timer(name, timing_raw)
        marked_timer(name, timing_raw, color=None)*
    """,
    "verl.utils.profiler.config": """
        ProfilerConfig
        NsightToolConfig
        NPUToolConfig
        TorchProfilerToolConfig
        TorchMemoryToolConfig
    """,
    "verl.utils.profiler.profile": """
        DistProfiler(rank, config=None, tool_config=None)
        DistProfiler.annotate
        DistProfilerExtension
        DistProfilerExtension.start_profile
        DistProfilerExtension.stop_profile
    """,
    "verl.utils.debug": """
        marked_timer(name, timing_raw, color=None)*
        simple_timer(name, timing_raw)
        log_gpu_memory_usage(head, logger=None)*
        GPUMemoryLogger
    """,
    "verl.utils.debug.metrics": "calculate_debug_metrics(data)",
    "verl.utils.rollout_trace": """
        RolloutTraceConfig
        RolloutTraceConfig.init(
            project_name, experiment_name, backend, token2text=False,
            max_samples_per_step_per_worker=None
        )
        RolloutTraceConfig.get_instance()
        RolloutTraceConfig.get_backend()
        RolloutTraceConfig.get_client()
        RolloutTraceConfig.enable_token2text()
        RolloutTraceConfig.reset()
        rollout_trace_op(_)
        rollout_trace_attr(
            sample_index=..., step=..., rollout_n=..., name=..., validate=..., trace=...
        )
    """,
    "verl.utils.rollout_skip": """
        DataProto
        RolloutSkip(config, rollout_wg)
        RolloutSkip.wrap_generate_sequences()
    """,
}
