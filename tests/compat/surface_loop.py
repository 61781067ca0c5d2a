"""Agent loops, datasets, samplers and built-in rewards."""

LOOP = {
    "verl.experimental.agent_loop": """
        AgentLoopManager(
            config, worker_group=None, rollout_resource_pool=None, rm_resource_pool=None
        )
        AgentLoopManager.generate_sequences(prompts)
        AgentLoopManager.rollout_replicas
        AgentLoopManager.server_handles
        AgentLoopBase(
            trainer_config, server_manager, tokenizer, processor, dataset_cls, dataset_config
        )
        AgentLoopBase.config
        AgentLoopBase.server_manager
        AgentLoopBase.tokenizer
        AgentLoopBase.processor
        AgentLoopBase.loop
        AgentLoopBase.apply_chat_template_kwargs
        AgentLoopBase.run(sampling_params)
        AgentLoopBase.apply_chat_template(
            messages, tools=None, images=None, videos=None, remove_system_prompt=False
        )
        AgentLoopBase.init_class(config, tokenizer, processor)
        AgentLoopOutput
        AgentLoopMetrics
    """,
    "verl.experimental.agent_loop.agent_loop": """
        get_trajectory_info(step, index, validate)
        register(agent_name)
        AsyncLLMServerManager(config, server_handles, max_cache_size=10000)
        AsyncLLMServerManager.generate(request_id)*
        AgentLoopBase
        AgentLoopManager
        AgentLoopOutput
        AgentLoopMetrics
        DictConfigWrap
    """,
    "verl.experimental.dataset.sampler": """
        AbstractSampler(data_source, data_config)
        AbstractCurriculumSampler(data_source, data_config)
        AbstractCurriculumSampler.update(batch)
    """,
    "verl.utils.dataset": """
        RLHFDataset
        collate_fn(_)
    """,
    "verl.utils.dataset.rl_dataset": """
        RLHFDataset(data_files, tokenizer, config, processor=None, max_samples=-1)
        RLHFDataset.maybe_filter_out_long_prompts(_)
        RLHFDataset.resume_dataset_state()
        RLHFDataset.split(_)
        RLHFDataset.on_batch_end(batch)
        collate_fn(data_list)
        get_dataset_class(data_config)
    """,
    "verl.utils.reward_score": """
        default_compute_score(
            data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None,
            concurrent_semaphore=None, memory_limit_mb=None
        )
    """,
    "verl.utils.reward_score.gsm8k": """
        compute_score(
            solution_str, ground_truth, method="strict", format_score=0.0, score=1.0
        )
        extract_solution(solution_str, method="strict")
    """,
}
