#!/usr/bin/env bash
# GRPO on GSM8K with SGLang as the rollout engine. Data: examples/data_preprocess/gsm8k.py.
set -euo pipefail

: "${SGLANG_PYTHON:?set it to the interpreter of an environment with SGLang, see examples/sglang/README.md}"
: "${MODEL:=Qwen/Qwen2.5-0.5B-Instruct}"
: "${DATA:=$HOME/data/gsm8k}"

python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.python="$SGLANG_PYTHON" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    "$@"
