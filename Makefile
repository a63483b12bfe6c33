# Sidestream: everything a newcomer needs is one word behind `make`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
comma := ,
RUN := $(VENV)/.installed-run
SRV := $(VENV)/.installed-server
DEV := $(VENV)/.installed

.PHONY: help venv generate serve test gpu-test check format lint types bench-cpu gpu-bench gpu-bench-streams gpu-bench-decode clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: $(DEV) ## make the virtual environment with all pinned dependencies

# $(call install,what,file,files whose names are shown,size)
define install
	@echo "Installing $(1) into $(VENV), once ($(2), $(4)):"
	@sed -E '/^(#|-r|$$)/d; s/==/ /' $(3) | paste -sd, - | sed 's/,/, /g' | fold -s -w 110 | sed 's/^/  /'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(2) 2> $(VENV)/pip.log || (cat $(VENV)/pip.log; exit 1)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . 2>> $(VENV)/pip.log || (cat $(VENV)/pip.log; exit 1)
endef

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "Sidestream needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; set PYTHON=..." % v[:2])'
	@$(PYTHON) -m venv $(VENV)

$(RUN): requirements/run.txt pyproject.toml | $(BIN)/python
	$(call install,what the engine runs on,requirements/run.txt,requirements/run.txt,1.2 GB with a CPU build of torch)
	@touch $@

$(SRV): requirements/server.txt $(RUN)
	$(call install,what the server needs,requirements/server.txt,requirements/server.txt,0.7 GB more)
	@touch $@

$(DEV): $(RUN) $(wildcard requirements/*.txt)
	$(call install,what the tests need: the server$(comma) real clients of it$(comma) checkers,requirements/dev.txt,$(filter-out %/run.txt,$(wildcard requirements/*.txt)),1.6 GB more with the server)
	@touch $(SRV) $@

generate: $(RUN) ## answer the bundled prompts with the bundled checkpoint
	@$(BIN)/sidestream generate --demo

serve: $(SRV) ## serve the bundled checkpoint on localhost:8000; ARGS="path/to/checkpoint --port 8001" another
	@$(BIN)/sidestream serve $(ARGS)

test: $(DEV) ## run every test that needs no GPU, a process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

gpu-test: ## run the tests that need a Hopper GPU, with PYTHON as it is
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu tests/ops/test_capture_on_cuda.py -m gpu -p no:benchmark

check: format lint types test ## format, lint, check types, then test

format: $(DEV) ## rewrite sources in the house format
	$(BIN)/ruff format .

lint: $(DEV) ## lint
	$(BIN)/ruff check --fix .

types: $(DEV) ## mypy, strict
	$(BIN)/mypy

bench-cpu: $(DEV) ## compare with transformers on this CPU
	$(BIN)/python benchmarks/cpu_vs_transformers.py

gpu-bench: ## run every benchmark on a GPU, print one table, write benchmarks/results/h200-DATE.json
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_bench.py

gpu-bench-streams: ## measure on a GPU what breaks cost and handoffs hide, with PYTHON as it is
	PYTHONPATH=. $(PYTHON) benchmarks/streams_gpu.py --json benchmarks/results/streams-gpu.json

gpu-bench-decode: ## measure inter-token latency of the whole engine on a GPU
	PYTHONPATH=. $(PYTHON) benchmarks/decode_gpu.py --json benchmarks/results/decode-gpu.json

clean: ## remove caches, keep the virtual environment
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
