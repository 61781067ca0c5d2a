#!/bin/bash
# On the first machine. Prints the token that the other machines need, and stays in the background.
set -euo pipefail
export RAY_AUTH_MODE=token
ray get-auth-token --generate
ray start --head --port="${PORT:-6379}" --dashboard-host=127.0.0.1 \
    --num-gpus="${GPUS_PER_NODE:-8}" "$@"
