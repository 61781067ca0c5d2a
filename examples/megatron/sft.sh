#!/bin/sh
# Fine-tuning with megatron-core: tensor 2 x pipeline 2. Arguments are passed on.
#   GPUS=8 MODEL=Qwen/Qwen2.5-7B-Instruct examples/megatron/sft.sh trainer.total_epochs=1
set -eu
data=${DATA:-$HOME/data/gsm8k_sft}
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m verl.trainer.sft_trainer \
    engine=megatron optim=megatron \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=256 \
    data.max_length=2048 \
    data.max_token_len_per_gpu=8192 \
    model.path="${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    engine.tensor_model_parallel_size=2 \
    engine.pipeline_model_parallel_size=2 \
    optim.lr=1e-5 \
    optim.lr_decay_style=cosine \
    trainer.total_epochs=2 \
    trainer.save_freq=after_each_epoch \
    "$@"
