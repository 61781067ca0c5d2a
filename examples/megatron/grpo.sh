#!/bin/sh
# GRPO with megatron-core: tensor 2 x pipeline 2, generation with vLLM. Arguments are passed on.
#   MODEL=Qwen/Qwen3-30B-A3B examples/megatron/grpo.sh \
#       actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
#       actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
set -eu
data=${DATA:-$HOME/data/gsm8k}
python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2-7B-Instruct}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.nnodes="${NNODES:-1}" \
    trainer.total_epochs=15 \
    "$@"
