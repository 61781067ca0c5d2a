#!/bin/sh
# GSM8K from raw rows to an evaluated model, one stage per call; other arguments go to the stage.
#
#   RAW=raw/gsm8k examples/gsm8k/run.sh data       rows for fine-tuning and for reinforcement
#   MODEL=... examples/gsm8k/run.sh sft            supervised fine-tuning
#   examples/gsm8k/run.sh grpo                     reinforcement from the fine-tuned model
#   examples/gsm8k/run.sh ppo                      the same with a critic
#   examples/gsm8k/run.sh evaluate FOLDER          greedy answers of a model to the test questions
set -eu
here=$(dirname "$0")
out=${OUT:-runs/gsm8k}
stage=$1
shift
case $stage in
data)
    python "$here/../data_preprocess/gsm8k.py" ${RAW:+--local_dataset_path "$RAW"} --local_save_dir "$out/data"
    python "$here/../data_preprocess/gsm8k_multiturn_sft.py" ${RAW:+--local_dataset_path "$RAW"} --local_save_dir "$out/sft_data"
    ;;
sft)
    python -m verl.trainer.sft_trainer \
        data.train_files="$out/sft_data/train.parquet" \
        data.val_files="$out/sft_data/test.parquet" \
        data.train_batch_size=64 \
        data.max_length=1024 \
        data.max_token_len_per_gpu=32768 \
        model.path="$MODEL" \
        model.enable_gradient_checkpointing=False \
        optim.lr=1e-4 \
        optim.lr_warmup_steps_ratio=0.05 \
        optim.lr_scheduler_type=cosine \
        optim.weight_decay=0.0 \
        trainer.total_epochs=3 \
        trainer.test_freq=after_each_epoch \
        trainer.save_freq=-1 \
        trainer.default_local_dir="$out/sft" \
        "$@"
    ;;
grpo | ppo)
    newest="$out/sft/latest_checkpointed_iteration.txt"
    model=${MODEL:-$out/sft/global_step_$(cat "$newest")/huggingface}
    if [ "$stage" = ppo ]; then
        set -- algorithm.adv_estimator=gae \
            critic.model.path="$model" \
            critic.optim.lr=3e-5 \
            critic.use_dynamic_bsz=True \
            critic.ppo_max_token_len_per_gpu=65536 \
            actor_rollout_ref.rollout.n=4 \
            "$@"
    fi
    python -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files="$out/data/train.parquet" \
        data.val_files="$out/data/test.parquet" \
        data.train_batch_size=128 \
        data.max_prompt_length=320 \
        data.max_response_length=256 \
        actor_rollout_ref.model.path="$model" \
        actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=1e-5 \
        actor_rollout_ref.actor.optim.weight_decay=0.0 \
        actor_rollout_ref.actor.ppo_mini_batch_size=128 \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536 \
        actor_rollout_ref.actor.use_kl_loss=False \
        actor_rollout_ref.rollout.n=16 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.25 \
        trainer.total_training_steps=150 \
        trainer.test_freq=25 \
        trainer.save_freq=-1 \
        trainer.default_local_dir="$out/$stage" \
        trainer.logger='[console,file]' \
        trainer.n_gpus_per_node=1 \
        "$@"
    ;;
*)
    echo "unknown stage $stage" >&2
    exit 2
    ;;
esac
