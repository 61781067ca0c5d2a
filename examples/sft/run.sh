#!/bin/sh
# Fine-tune the quickstart's model on its demonstrations, on two ranks. Arguments are passed on.
set -eu
quickstart=$(dirname "$0")/../quickstart
out=${OUT:-runs/sft}
test -d "$out/model" || python "$quickstart/build_model.py" --out "$out/model"
test -d "$out/data" || python "$quickstart/make_data.py" --out "$out/data"
export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
torchrun --standalone --nproc_per_node="${RANKS:-2}" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$out/data/sft_worked_out.parquet" \
    data.val_files="$out/data/sft_test.parquet" \
    data.prompt_key=prompt \
    data.response_key=response \
    data.train_batch_size=64 \
    data.micro_batch_size_per_gpu=64 \
    data.max_length=64 \
    model.partial_pretrain="$out/model" \
    model.enable_gradient_checkpointing=False \
    optim.lr=3e-3 \
    optim.betas='[0.9,0.98]' \
    optim.lr_warmup_steps=20 \
    optim.min_lr_ratio=0.1 \
    trainer.total_training_steps=150 \
    trainer.test_freq=50 \
    trainer.default_local_dir="$out/checkpoints" \
    trainer.logger='[console,file]' \
    "$@"
