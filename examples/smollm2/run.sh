#!/bin/sh
# GRPO on SmolLM2-135M: short sums, on a CPU. Arguments are passed on to the trainer.
set -eu
here=$(dirname "$0")
out=${OUT:-runs/smollm2}
test -d "$out/model" || python "$here/prepare.py" --out "$out/model"
test -d "$out/data" || python "$here/make_data.py" --out "$out/data"
export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/data/train.parquet" \
    data.val_files="$out/data/test.parquet" \
    data.train_batch_size=8 \
    data.max_prompt_length=48 \
    data.max_response_length=16 \
    custom_reward_function.path="$here/reward.py" \
    actor_rollout_ref.model.path="$out/model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.total_training_steps=30 \
    trainer.test_freq=5 \
    trainer.save_freq=30 \
    trainer.validation_data_dir="$out/transcripts" \
    trainer.default_local_dir="$out/checkpoints" \
    trainer.logger='[console,file]' \
    trainer.n_gpus_per_node=1 \
    "$@"
