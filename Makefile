# 'make quickstart' and 'make test' are the two commands that a fresh machine needs.
# Every target first builds .venv, and installs again when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Added to the commands below, for example: make quickstart SEED=1 ARGS="learner.lr=1e-4"
SEED ?=
ARGS ?=
BENCH ?= overhead

# No DeepSpeed kernel is compiled; DS_ACCELERATOR=cuda in the environment uses a GPU.
export DS_BUILD_OPS := 0
DS_ACCELERATOR ?= cpu
export DS_ACCELERATOR
export PYTHONUNBUFFERED := 1

BIN := .venv/bin
READY := .venv/.installed
OVERRIDES = $(if $(SEED),run.seed=$(SEED)) $(ARGS)
EXACT := rollout/flow/*,learner/credit/*,learner/objective/*

.PHONY: help quickstart demo test test-long chaos lint bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

quickstart: $(READY) ## train the shipped model with Stepwise-Flow-GRPO: a quarter of an hour, two cores
	$(BIN)/flowcredit train configs/quickstart.toml $(OVERRIDES)

demo: $(READY) ## the longer run; stop it and start it again as you like, it continues
	$(BIN)/flowcredit train configs/demo.toml $(if $(SEED),run.dir=runs/demo-$(SEED)) $(OVERRIDES)

test: lint ## lint, then every test but the long ones, with coverage and its limits
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=90
	$(BIN)/coverage report --include='$(EXACT)' --fail-under=100

test-long: $(READY) ## the tests that take minutes each
	$(BIN)/python -m pytest -m long --durations=20 --timeout=7200 $(ARGS)

chaos: $(READY) ## kill every kind of part in every phase and check the books, into docs/chaos.md: about an hour
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(READY) ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(READY) ## a benchmark (BENCH=comparison; default: overhead, the system against a bare loop)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

clean: ## remove caches and build leftovers; runs and .venv stay
	rm -rf build dist *.egg-info .coverage .coverage.* .pytest_cache .ruff_cache htmlcov
	find rollout learner rewards cluster tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "flowcredit needs Python >= 3.11, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@
