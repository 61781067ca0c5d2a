#!/bin/bash
# On every other machine: HEAD=<address of the first> RAY_AUTH_TOKEN=<what head.sh printed>
set -euo pipefail
export RAY_AUTH_MODE=token
: "${RAY_AUTH_TOKEN:?is not set; head.sh prints it}"
ray start --address="${HEAD:?is not set}:${PORT:-6379}" --num-gpus="${GPUS_PER_NODE:-8}" "$@"
