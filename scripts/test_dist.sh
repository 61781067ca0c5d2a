#!/usr/bin/env bash
# Install the wheel into an environment of its own, and use it in a folder that has no repository.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls -t dist/verl-*.whl | head -1) root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet -c requirements/constraints.txt "$wheel[plot]"
cp -r examples/quickstart "$folder/quickstart"
cd "$folder"
venv/bin/verl doctor
venv/bin/python quickstart/run.py --out run "$@"
venv/bin/python -m recipe.dapo.main_dapo trainer.dry_run=True trainer.n_gpus_per_node=1 > plan.txt
test -s run/page.html && grep -q "data.train_batch_size" plan.txt
echo "the wheel $(basename "$wheel") works outside $(basename "$root")"
