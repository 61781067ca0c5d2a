#!/bin/bash
# GRPO on GSM8K. DATA, MODEL, GPUS and RUN may be set; arguments are passed on.
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.n=8 \
    trainer.n_gpus_per_node="${GPUS:-1}" \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.total_epochs=5 \
    trainer.board=True \
    trainer.default_local_dir="${RUN:-runs/gsm8k/grpo}" \
    "$@"
