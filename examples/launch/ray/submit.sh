#!/bin/bash
# On the first machine, from the root of the repository: run train.sh as a job of the cluster.
# It goes on when this terminal closes; `ray job logs`, `ray job stop` and `ray job status` tell more.
set -euo pipefail
export RAY_AUTH_MODE=token
ray job submit --address=http://127.0.0.1:8265 \
    --runtime-env=verl/trainer/runtime_env.yaml --no-wait \
    -- env NNODES="${NNODES:?is not set}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}" \
    DATA="${DATA:?is not set}" CHECKPOINTS="${CHECKPOINTS:?is not set}" \
    bash examples/launch/train.sh "$@"
