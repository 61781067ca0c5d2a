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
        AgentLoopBase.mm_processor_kwargs
        AgentLoopBase.process_vision_info(messages)
        AgentLoopBase.rollout_config
        AgentLoopBase.system_prompt
        AgentLoopBase.run(sampling_params)
        AgentLoopBase.apply_chat_template(
            messages, tools=None, images=None, videos=None, remove_system_prompt=False
        )
        AgentLoopBase.init_class(config, tokenizer, processor)
        AgentLoopOutput
        AgentLoopMetrics
    """,
    "verl.experimental.agent_loop.agent_loop": """
        _agent_loop_registry
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
    "verl.experimental.agent_loop.tool_parser": """
        FunctionCall
        ToolParser
        ToolParser.extract_tool_calls(responses_ids, tools=None)
        ToolParser.get_tool_parser(name, tokenizer)
        ToolParser.register(name)
    """,
    "verl.experimental.agent_loop.single_turn_agent_loop": """
        SingleTurnAgentLoop
    """,
    "verl.experimental.agent_loop.tool_agent_loop": """
        AgentData(messages)*
        AgentState
        ToolAgentLoop
        ToolAgentLoop.run(sampling_params)
    """,
    "verl.interactions.base": """
        BaseInteraction(config)
        BaseInteraction.start_interaction(instance_id=None)
        BaseInteraction.generate_response(instance_id, messages)
        BaseInteraction.calculate_score(instance_id)
        BaseInteraction.finalize_interaction(instance_id)
    """,
    "verl.interactions.gsm8k_interaction": """
        Gsm8kInteraction(config)
    """,
    "verl.interactions.weather_interaction": """
        WeatherInteraction(config)
    """,
    "verl.interactions.utils.interaction_registry": """
        get_interaction_class(class_name)
        initialize_interactions_from_config(interaction_config_file)
    """,
    "verl.experimental.dataset.sampler": """
        AbstractSampler(data_source, data_config)
        AbstractCurriculumSampler(data_source, data_config)
        AbstractCurriculumSampler.update(batch)
    """,
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": """
        AbstractDataGenerator(config)
        AbstractDataGenerator.generate(dataset)
        MockDataGenerator(config)
        DynamicGenDataset(data_files, tokenizer, config, processor=None, max_samples=-1)
        DynamicGenDataset.on_batch_end(batch)
    """,
    "verl.experimental.reward_loop": """
        RewardLoopManager(config, rm_resource_pool=None)
        RewardLoopManager.compute_rm_score(data)
        RewardLoopWorker(config, reward_router_address=None)
        RewardModelManager(config, resource_pool=None)
        RewardModelManager.get_router_address()
        RewardModelManager.wake_up()
        RewardModelManager.sleep()
    """,
    "verl.experimental.reward_loop.reward_manager": """
        register(name)
        get_reward_manager_cls(name)
        RewardManagerBase(config, tokenizer)
    """,
    "verl.experimental.reward_loop.reward_manager.base": """
        RewardManagerBase(config, tokenizer)
        RewardManagerBase.init_class(config, tokenizer)
        RewardManagerBase.run_single(data)
    """,
    "verl.experimental.reward_loop.reward_manager.limited": """
        AsyncTokenBucket(rate_limit, max_tokens=None)
        AsyncTokenBucket.acquire(num_tokens=1.0)
        RateLimitedRewardManager(
            config, tokenizer, compute_score=None, reward_router_address=None,
            reward_model_tokenizer=None
        )
        RateLimitedRewardManager.init_class(config, tokenizer)
        RateLimitedRewardManager.run_single(data)
    """,
    "verl.utils.dataset": """
        RLHFDataset
        collate_fn(_)
    """,
    "verl.utils.dataset.dynamicgen_dataset": """
        AbstractDataGenerator
        DynamicGenDataset
        MockDataGenerator
    """,
    "verl.utils.dataset.rl_dataset": """
        RLHFDataset(data_files, tokenizer, config, processor=None, max_samples=-1)
        RLHFDataset.maybe_filter_out_long_prompts(_)
        RLHFDataset.resume_dataset_state()
        RLHFDataset.split(_)
        RLHFDataset.on_batch_end(batch)
        RLHFDataset.process_vision_info(messages, image_patch_size, config)
        collate_fn(data_list)
        get_dataset_class(data_config)
    """,
    "verl.utils.reward_score": """
        default_compute_score(
            data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None,
            concurrent_semaphore=None, memory_limit_mb=None
        )
    """,
    "verl.utils.reward_score.prime_code": """
        apps_check_correctness(in_outs, generation, timeout=...)
        compute_score(completion, test_cases, continuous=False)
    """,
    "verl.utils.reward_score.sandbox_fusion": """
        compute_score(_, _, memory_limit_mb, completion, test_cases, continuous=False, timeout=10)
    """,
    "verl.utils.reward_score.sandbox_fusion.utils": """
        call_sandbox_api(
            _, code, stdin, compile_timeout, run_timeout, memory_limit_mb, language="python"
        )
        check_correctness(
            sandbox_fusion_url, in_outs, generation, timeout=10, memory_limit_mb=1024,
            language="python", concurrent_semaphore=None
        )
    """,
    "verl.utils.reward_score.geo3k": """
        compute_score(predict_str, ground_truth, use_boxed=True, format_score=0.1)
    """,
    "verl.utils.reward_score.gsm8k": """
        compute_score(
            solution_str, ground_truth, method="strict", format_score=0.0, score=1.0
        )
        extract_solution(solution_str, method="strict")
    """,
    "verl.utils.reward_score.math_batch": """
        compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos)
    """,
    "verl.utils.reward_score.math_dapo": """
        last_boxed_only_string(_)
        remove_boxed(_)
        compute_score(solution_str, ground_truth, strict_box_verify=False)
    """,
    "verl.utils.reward_score.math_reward": """
        compute_score(solution_str, ground_truth)
        last_boxed_only_string(_)
        remove_boxed(_)
        is_equiv(_, _)
        strip_string(_)
    """,
    "verl.utils.reward_score.math_verify": """
        compute_score(model_output, ground_truth, timeout_score=0)
    """,
    "verl.utils.reward_score.prime_math": """
        compute_score(model_output, ground_truth)
    """,
    "verl.utils.reward_score.search_r1_like_qa_em": """
        compute_score(
            solution_str, ground_truth, method="strict", format_score=0.0, score=1.0
        )
        extract_solution(solution_str)
    """,
    "verl.tools.base_tool": """
        BaseTool(config, tool_schema)*
        BaseTool.name
        BaseTool.config
        BaseTool.tool_schema
        BaseTool.get_openai_tool_schema()
        BaseTool.create(instance_id=None)
        BaseTool.execute(instance_id, parameters)
        BaseTool.calc_reward(instance_id)
        BaseTool.release(instance_id)
        OpenAIFunctionToolSchema
    """,
    "verl.tools.geo3k_tool": """
        Geo3kTool(config, tool_schema)*
    """,
    "verl.tools.gsm8k_tool": """
        Gsm8kTool(config, tool_schema)*
    """,
    "verl.tools.image_zoom_in_tool": """
        ImageZoomInTool(config, tool_schema)*
    """,
    "verl.tools.function_tool": """
        function_tool
        FunctionTool(name, fn, tool_schema, is_async)
        FunctionTool.call(_)
        get_function_tool(name)
        load_function_tools_from_path(_)
        normalize_function_tool_return(_)
    """,
    "verl.tools.mcp_base_tool": """
        MCPBaseTool(config, tool_schema=None)
        MCPBaseTool._parse_tool_result(content)
    """,
    "verl.tools.mcp_search_tool": """
        MCPSearchTool(config, tool_schema=None)
    """,
    "verl.tools.schemas": """
        OpenAIFunctionCallSchema.from_openai_function_parsed_schema(_)
        OpenAIFunctionParametersSchema
        OpenAIFunctionParsedSchema
        OpenAIFunctionPropertySchema
        OpenAIFunctionSchema
        OpenAIFunctionToolCall
        OpenAIFunctionToolSchema
        ToolResponse
        ToolResponse.is_empty()
        ToolResponse.is_text_only()
    """,
    "verl.tools.tool_registry": """
        ToolType
        get_tool_class(_)
        initialize_tools_from_config(_)
        load_all_tools(tool_config_path=None, function_tool_path=None)
    """,
    "verl.tools.utils.tool_registry": """
        ToolType
        get_tool_class(_)
        initialize_tools_from_config(_)
    """,
}
