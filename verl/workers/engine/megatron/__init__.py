"""Training with megatron-core: tensor, pipeline, context and expert parallelism."""
