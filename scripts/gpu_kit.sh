#!/usr/bin/env bash
# Put what a bare GPU machine lacks into a folder, to be copied there with this checkout. Such a
# machine has torch, triton, transformers, peft and pytest, but no network. On it:
#
#     export PYTHONPATH=$PWD:$PWD/build/gpu_kit HF_HUB_OFFLINE=1
#     python3 -m pytest -m gpu -W default -n 8 --dist loadfile tests/models tests/utils tests/workers
#     python3 benchmarks/gpu/all.py --out OUT --trl build/trl
#     python3 -m benchmarks.gpu.megatron --out OUT/megatron.json
#     python3 scripts/mutate.py --count 200 --jobs 14 --deadline-seconds 560 --output OUT/mutants.txt
#
# GPU_PYTHON is that machine's Python version.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=build/gpu_kit trl=build/trl
pip=("${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check)

rm -rf "$kit" "$trl"
"${pip[@]}" install --no-deps --no-compile --target "$kit" -c requirements/constraints.txt \
    hydra-core omegaconf antlr4-python3-runtime cloudpickle pyvers execnet pytest-xdist \
    pytest-timeout pytest-asyncio
"${pip[@]}" install --no-deps --no-compile --target "$kit" -c requirements/constraints.txt \
    --upgrade --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" tensordict \
    hypothesis sortedcontainers math-verify latex2sympy2-extended \
    pydantic pydantic-core annotated-types typing-inspection \
    fastapi starlette annotated-doc uvicorn h11 click prometheus-client megatron-core
"${pip[@]}" install --no-deps --no-compile --target "$trl" -c requirements/constraints.txt \
    --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" -r requirements/trl.txt
du -sh "$kit" "$trl"
