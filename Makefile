# Needs only Python >= 3.11 with venv and pip, and make. Settings, as in `make run PROMPT="..."`:
#   PYTHON       the interpreter that makes the environment
#   VENV         where the environment is
#   TORCH_INDEX  an extra package index with CPU builds of PyTorch, for machines where the default one has none
#   PROMPT       what `make run` asks
#   JOBS         test processes
#   GPUS         GPUs of `make bench-gpu`; above 1 they share one model
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PROMPT ?= Why is the sky blue?
JOBS ?= 2
GPUS ?= 1

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One stamp per set of packages: a second run finds it and starts at once. Sources need no stamp, the install is editable.
VENV_STAMP := $(VENV)/stamp-venv
RUN_STAMP := $(VENV)/stamp-run
TEST_STAMP := $(VENV)/stamp-test
CLIENTS_STAMP := $(VENV)/stamp-clients
# Ray brings many packages along: an environment of its own.
REPLICAS_VENV := $(VENV)-replicas
REPLICAS_STAMP := $(REPLICAS_VENV)/stamp
# So do programs that evaluate models.
EVALUATION_VENV := $(VENV)-evaluation
EVALUATION_STAMP := $(EVALUATION_VENV)/stamp
export PROMPT

.PHONY: help run test test-clients test-browser test-replicas fuzz check docs bench-cpu test-gpu bench-gpu bench-gpu-ladder bench-gpu-peers clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(RUN_STAMP)  ## Install Soloist, fetch the default model (98 MB) and answer PROMPT
	@$(BIN)/soloist run -n 512 "$$PROMPT"

test: check  ## Everything a change must pass: checks, then all tests
	@$(BIN)/python -c 'from soloist.hub import find_model; find_model()' \
	    || echo "make: without the default model the tests that need it are skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10

test-clients: $(CLIENTS_STAMP) $(EVALUATION_STAMP)  ## The official clients of OpenAI and Anthropic, lm-eval and guidellm against the server
	$(BIN)/python -m pytest tests/clients/test_official_clients.py
	OMP_NUM_THREADS=1 $(EVALUATION_VENV)/bin/python -m pytest tests/clients/test_evaluation.py tests/clients/test_telemetry.py --timeout 600

test-browser: $(CLIENTS_STAMP)  ## The page in headless Chromium, which must be installed; SCREENSHOTS=FOLDER keeps pictures
	$(BIN)/python -m pytest tests/browser

test-replicas: $(REPLICAS_STAMP)  ## Two replicas on a Ray cluster of this machine, one killed during a stream
	OMP_NUM_THREADS=1 $(REPLICAS_VENV)/bin/python -m pytest tests/replicas

fuzz: $(CLIENTS_STAMP)  ## Thousands of wrong requests: the server answers each and lives on
	$(BIN)/python -m pytest tests/clients/test_fuzz.py --timeout 1800

check: $(TEST_STAMP)  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(TEST_STAMP)  ## Regenerate docs/cli.md from the command line itself
	$(BIN)/python docs/generate.py

bench-cpu: $(RUN_STAMP)  ## Compare with other engines on this CPU: builds them first, takes about 15 minutes
	$(BIN)/python benchmarks/cpu_peers.py

# On a machine with a GPU the interpreter that has PyTorch for CUDA is used as it is; nothing is installed. What takes
# several GPUs runs by itself: it counts seconds, and has all of them.
GPU_PYTEST = PYTHONPATH=src $(PYTHON) -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -rf --durations 5
SEVERAL_GPUS := tests/runtime/test_tp_gpu.py tests/profiler/test_ranks_gpu.py
test-gpu:  ## Every kernel and the captured step on this machine's GPU, with PYTHON's own packages
	@status=0; \
	$(GPU_PYTEST) \
	    $$($(PYTHON) -c 'import os, xdist; print("-n", min(12, os.cpu_count()), "--dist worksteal")' 2>/dev/null) \
	    tests/kernels tests/runtime tests/profiler tests/spec/test_draft_graph.py $(SEVERAL_GPUS:%=--ignore=%) \
	    -k "(triton or head or graph or cuda or gpu or loop or waits or ahead) and not machine_code" || status=$$?; \
	$(GPU_PYTEST) $(SEVERAL_GPUS) || status=$$?; exit $$status

bench-gpu:  ## Steps of full-size models on this machine's GPU, and every operator by width; with GPUS=2, 4 or 8 Ling-3.0-flash whole on so many
ifeq ($(GPUS),1)
	PYTHONPATH=src $(PYTHON) benchmarks/decode_gpu.py qwen2-1.5b-nodraft ling3-tiny-nodraft ling3-tiny-verify \
	    ling3-tiny-long ling3-flash-shard2-nodraft ling3-flash-shard2-verify
	PYTHONPATH=src $(PYTHON) benchmarks/kernels.py
else
	PYTHONPATH=src $(PYTHON) benchmarks/decode_tp_gpu.py --ranks $(GPUS) nodraft dspark mtp ladder
	PYTHONPATH=src $(PYTHON) benchmarks/product_tp_gpu.py --ranks $(GPUS)
	PYTHONPATH=src $(PYTHON) benchmarks/allreduce_gpu.py --ranks $(GPUS)
	PYTHONPATH=src $(PYTHON) benchmarks/decode_tp_gpu.py --ranks $(GPUS) --model ling-3.0-tiny nodraft
endif

bench-gpu-ladder:  ## What each switch of a step gives, drafts by width, the way to the first token, on this machine's GPU
	PYTHONPATH=src $(PYTHON) benchmarks/ladder_gpu.py qwen2-1.5b-ladder qwen2-1.5b-drafts ling3-tiny-ladder
	PYTHONPATH=src $(PYTHON) benchmarks/startup_gpu.py

bench-gpu-peers:  ## PyTorch and transformers beside this engine in one run, on this machine's GPU
	PYTHONPATH=src $(PYTHON) benchmarks/peers_gpu.py

clean:  ## Remove the environment and every cache
	rm -rf $(VENV) $(REPLICAS_VENV) $(EVALUATION_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Soloist needs Python >= 3.11, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUN_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(TEST_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(RUN_STAMP)

$(CLIENTS_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[test,clients]'
	@touch $@ $(TEST_STAMP) $(RUN_STAMP)

$(REPLICAS_STAMP) $(EVALUATION_STAMP): %/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[test,$(patsubst $(VENV)-%,%,$*)]'
	@touch $@
