# Needs only Python >= 3.11 with venv and pip, and make. Settings, as in `make run PROMPT="..."`:
#   PYTHON       the interpreter that makes the environment
#   VENV         where the environment is
#   TORCH_INDEX  an extra package index with CPU builds of PyTorch, for machines where the default one has none
#   PROMPT       what `make run` asks
#   JOBS         test processes
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PROMPT ?= Why is the sky blue?
JOBS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One stamp per set of packages: a second run finds it and starts at once. Sources need no stamp, the install is editable.
VENV_STAMP := $(VENV)/stamp-venv
RUN_STAMP := $(VENV)/stamp-run
TEST_STAMP := $(VENV)/stamp-test
export PROMPT

.PHONY: help run test check docs bench-cpu clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(RUN_STAMP)  ## Install Soloist, fetch the default model (98 MB) and answer PROMPT
	@$(BIN)/soloist run -n 512 "$$PROMPT"

test: check  ## Everything a change must pass: checks, then all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10

check: $(TEST_STAMP)  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(TEST_STAMP)  ## Regenerate docs/cli.md from the command line itself
	$(BIN)/python docs/generate.py

bench-cpu: $(RUN_STAMP)  ## Compare with other engines on this CPU: builds them first, takes about 15 minutes
	$(BIN)/python benchmarks/cpu_peers.py

clean:  ## Remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

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
