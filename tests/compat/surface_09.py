"""Names of verl 0.8 and 0.9 that are not in the tables beside this one."""

SECOND_GENERATION = {
    "verl.checkpoint_engine": """
        CheckpointEngineManager(config, trainer, replicas=...)
        CheckpointEngineManager.update_weights(global_steps=None)
        CheckpointEngineManager.add_replicas(replicas)
        CheckpointEngineManager.remove_replicas(replicas)
    """,
    "verl.experimental.agent_loop.prometheus_utils": """
        update_prometheus_config(config, server_addresses, rollout_name=None)
    """,
    "verl.experimental.separation": """
        DetachActorWorker
        SeparateRayPPOTrainer
    """,
    "verl.experimental.separation.engine_workers": "DetachActorWorker",
    "verl.experimental.separation.ray_trainer": "SeparateRayPPOTrainer",
    "verl.trainer.ppo.v1.replay_buffer": """
        ReplayBuffer
        ReplayBuffer.sample(global_steps, partition_id, batch_size)
    """,
    "verl.utils.skip": "SkipManager.annotate(role='rollout')",
    "verl.utils.tokenizer.continuous_token": """
        align_response_metadata(segments)
        build_initial_tokens(tokenizer, messages, tools=None)
        merge_assistant_tokens(tokens, turn_ids)
        merge_non_assistant_tokens(tokenizer, tokens, messages, tools=None)
    """,
    "verl.workers.engine_workers": """
        ActorRolloutRefWorker
        TrainingWorker(config)
        TrainingWorker.infer_batch(data)
        TrainingWorker.load_checkpoint(local_path, hdfs_path=None, del_local_after_load=False)
        TrainingWorker.reset()
        TrainingWorker.save_checkpoint(
            local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None
        )
        TrainingWorker.set_loss_fn(loss_fn)
        TrainingWorker.to(device, model=True, optimizer=True, grad=True)
        TrainingWorker.train_batch(data)
        TrainingWorker.train_mini_batch(data)
    """,
    "verl.workers.rollout.llm_server": """
        AgentLoopWorker(config, llm_client, teacher_client=None, reward_loop_worker_handles=None)
        FullyAsyncLLMServerClient
        GlobalRequestLoadBalancer(servers, max_cache_size=..., full_determinism=...)
        GlobalRequestLoadBalancer.acquire_server(request_id)
        GlobalRequestLoadBalancer.add_servers(servers)
        GlobalRequestLoadBalancer.clear_sticky_cache()
        GlobalRequestLoadBalancer.get_status()
        GlobalRequestLoadBalancer.release_server(server_id)
        GlobalRequestLoadBalancer.remove_servers(server_ids)
        LLMServerClient(config, load_balancer_handle=None)
        LLMServerClient.generate(request_id)*
        LLMServerManager.create(config)*
    """,
    "verl.workers.rollout.schemas": "Message",
}
