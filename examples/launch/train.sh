#!/bin/bash
# GRPO on GSM8K, over all nodes of a Ray cluster that is running. Arguments are passed on.
#
#   NNODES, GPUS_PER_NODE   the shape of the cluster
#   DATA                    folder with train.parquet and test.parquet, on every node
#   MODEL                   a Hugging Face name, or a folder on every node
#   CHECKPOINTS             a folder that all nodes share
#   PID_FILE                where to write the number of this process, for who wants to signal it
set -euo pipefail
if [ -n "${PID_FILE:-}" ]; then echo $$ >"$PID_FILE"; fi
exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${DATA:?is not set}/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.n=8 \
    trainer.controller=ray \
    trainer.nnodes="${NNODES:?is not set}" \
    trainer.n_gpus_per_node="${GPUS_PER_NODE:-8}" \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.default_local_dir="${CHECKPOINTS:?is not set}" \
    ray_kwargs.ray_init.address=auto \
    "$@"
