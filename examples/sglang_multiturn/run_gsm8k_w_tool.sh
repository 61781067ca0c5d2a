#!/bin/sh
# GRPO on GSM8K with a tool that checks answers. MODEL is a model with a tool template (a Hugging Face
# folder), RAW the raw GSM8K; arguments are passed on to the trainer.
set -eu
here=$(dirname "$0")
out=${OUT:-runs/gsm8k_w_tool}
test -d "$out/data" || python "$here/../data_preprocess/gsm8k_multiturn_w_tool.py" \
    ${RAW:+--local_dataset_path "$RAW"} --local_save_dir "$out/data"
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/data/train.parquet" \
    data.val_files="$out/data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${MODEL:?set MODEL to a Hugging Face folder}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.name="${ENGINE:-native}" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/config/tool_config/gsm8k_tool_config.yaml" \
    trainer.default_local_dir="$out/checkpoints" \
    trainer.n_gpus_per_node=1 \
    trainer.test_freq=20 \
    trainer.total_epochs=1 \
    "$@"
