#!/usr/bin/env bash
# Write the YAML files under verl/trainer/config and docs/config.md from the dataclasses in
# verl/config. With --check nothing is written; a stale file is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m verl.config.generate "$@"
