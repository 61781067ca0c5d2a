#!/bin/sh
# SmolLM2-135M answers questions about a SQLite database: fine-tuning, then GRPO through the tool `sql`.
# SFT_STEPS and OUT may be set; arguments are passed on to the GRPO trainer.
set -eu
here=$(dirname "$0")
out=${OUT:-runs/sql}
sft_steps=${SFT_STEPS:-6}
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
smollm2=${SMOLLM2:-runs/smollm2/model}
test -d "$smollm2" || python "$here/../smollm2/prepare.py" --out "$smollm2"
test -f "$out/world.db" || python "$here/prepare.py" --out "$out" --model "$smollm2"
sft="$out/sft/global_step_$sft_steps/huggingface"
test -d "$sft" || VERL_FILE_LOGGER_PATH="$out/sft.jsonl" python -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$out/sft.parquet" \
    data.val_files="$out/sft.parquet" \
    data.val_max_samples=16 \
    data.multiturn.enable=True \
    data.train_batch_size=8 \
    data.micro_batch_size_per_gpu=8 \
    data.max_length=320 \
    model.partial_pretrain="$out/model" \
    model.enable_gradient_checkpointing=False \
    optim.lr=1e-4 \
    optim.lr_warmup_steps=2 \
    trainer.total_training_steps="$sft_steps" \
    trainer.total_epochs=100 \
    trainer.test_freq=-1 \
    trainer.default_local_dir="$out/sft" \
    trainer.logger='[console,file]' \
    trainer.n_gpus_per_node=1
export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/train.parquet" \
    data.val_files="$out/test.parquet" \
    data.train_batch_size=8 \
    data.max_prompt_length=224 \
    data.max_response_length=128 \
    custom_reward_function.path="$here/reward.py" \
    actor_rollout_ref.model.path="$sft" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=64 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$out/tools.yaml" \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    trainer.total_training_steps=20 \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    trainer.validation_data_dir="$out/transcripts" \
    trainer.default_local_dir="$out/checkpoints" \
    trainer.logger='[console,file]' \
    trainer.n_gpus_per_node=1 \
    "$@"
