# Sidestream: everything a newcomer needs is one word behind `make`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv generate test gpu-test check format lint types bench-cpu gpu-bench gpu-bench-streams gpu-bench-decode clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## make the virtual environment with the pinned dependencies

$(STAMP): $(wildcard requirements/*.txt) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "Sidestream needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; set PYTHON=..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (once, a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt 2> $(VENV)/pip.log || (cat $(VENV)/pip.log; exit 1)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . 2>> $(VENV)/pip.log || (cat $(VENV)/pip.log; exit 1)
	@touch $(STAMP)

generate: $(STAMP) ## answer the bundled prompts with the bundled checkpoint
	@$(BIN)/sidestream generate --demo

test: $(STAMP) ## run every test that needs no GPU, a process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

gpu-test: ## run the tests that need a Hopper GPU, with PYTHON as it is
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu tests/ops/test_capture_on_cuda.py -m gpu -p no:benchmark

check: format lint types test ## format, lint, check types, then test

format: $(STAMP) ## rewrite sources in the house format
	$(BIN)/ruff format .

lint: $(STAMP) ## lint
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

bench-cpu: $(STAMP) ## compare with transformers on this CPU
	$(BIN)/python benchmarks/cpu_vs_transformers.py

gpu-bench: ## run every benchmark on a GPU, print one table, write benchmarks/results/h200-DATE.json
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_bench.py

gpu-bench-streams: ## measure on a GPU what breaks cost and handoffs hide, with PYTHON as it is
	PYTHONPATH=. $(PYTHON) benchmarks/streams_gpu.py --json benchmarks/results/streams-gpu.json

gpu-bench-decode: ## measure inter-token latency of the whole engine on a GPU
	PYTHONPATH=. $(PYTHON) benchmarks/decode_gpu.py --json benchmarks/results/decode-gpu.json

clean: ## remove caches, keep the virtual environment
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
