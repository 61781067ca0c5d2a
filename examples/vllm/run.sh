#!/bin/sh
# The quickstart's GRPO with vLLM as the rollout engine. Arguments are passed on.
set -eu
quickstart=$(dirname "$0")/../quickstart
from=${FROM:-runs/quickstart}
out=${OUT:-runs/vllm}
vllm=${VERL_VLLM_PYTHON:-.venv-vllm/bin/python}
model="$from/habit/global_step_60/huggingface"
test -d "$model" || { echo "$model is not there; run make quickstart first" >&2; exit 1; }
test -x "$vllm" || { echo "$vllm is not there; set VERL_VLLM_PYTHON to a Python with vLLM" >&2; exit 1; }
mkdir -p "$out"
export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$from/data/train.parquet" \
    data.val_files="$from/data/test.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=8 \
    data.max_response_length=53 \
    data.seed=0 \
    custom_reward_function.path="$quickstart/reward.py" \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.betas='[0.9,0.99]' \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.python="$vllm" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=256 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128 \
    trainer.total_training_steps=15 \
    trainer.test_freq=5 \
    trainer.n_gpus_per_node=1 \
    trainer.device=cpu \
    trainer.default_local_dir="$out/checkpoints" \
    trainer.logger='[console,file]' \
    "$@"
