#!/usr/bin/env bash
# Install the wheel, which was built from the source distribution, into an environment of its own,
# and run the quickstart of that distribution in a folder that has no repository.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls -t dist/verl-*.whl | head -1) source=$(ls -t dist/verl-*.tar.gz | head -1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet -c requirements/constraints.txt "${wheel}[plot]"
tar -xzf "$source" -C "$folder" --strip-components=2 --wildcards '*/examples/quickstart'
cd "$folder"
venv/bin/verl doctor
venv/bin/python quickstart/run.py --out run "$@"
venv/bin/python -m recipe.dapo.main_dapo trainer.dry_run=True trainer.n_gpus_per_node=1 > plan.txt
test -s run/page.html || { echo "the quickstart wrote no page" >&2; exit 1; }
grep -q "prompts per step" plan.txt || { cat plan.txt >&2; exit 1; }
echo "$(basename "$wheel") and $(basename "$source") work outside the repository"
