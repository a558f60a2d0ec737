# Two commands need nothing but make, git and Python 3.11 or newer:
#
#   make demo    plan a model, train it on four local processes, compare with one process
#   make test    lint, format, strict types, then the tests but the slow ones
#   make slow    half of the slow tests: every model family, whole scripts; some 25 minutes.
#                Which half is in the commit's name; EVERY=1 runs all
#   make versions TORCH=2.14.1 PYTHON=python3.13    the tests of the code on another torch or Python
#
# All make .venv first. To use another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
# Another torch than constraints.txt has, for `make versions`; it gets an environment of its own.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
CODE := compiler passes cost_models tests examples benchmarks

# The strict editable install links source files one by one, so the stamp carries a checksum of
# their names: adding, moving or deleting a file links them anew.
SOURCES := find compiler passes cost_models -name '*.py' -o -name '*.json' -o -name '*.typed'
NAMES := $(shell $(SOURCES) | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/installed
LINKED := $(VENV)/linked-$(NAMES)
# Tests start many processes; compiled once, sources are not compiled in each of them. Groups start in
# the order of tests/conftest.py. A worker that crashes fails its test and is not replaced: what
# takes its place gets no work, and pytest-xdist 3.8 waits for it without end.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 \
  --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
STRICT := --config-settings editable_mode=strict

.PHONY: demo test slow versions seconds accuracy lint format schema readme install clean
.DEFAULT_GOAL := test

demo: install
	@$(BIN)/python examples/demo.py

test: lint
	@echo "== tests"
	@$(PYTEST) -m "not gpu and not slow"

# What long tests take, which decides whose turn it is: tests/support/sampling.py.
seconds: install
	@$(PYTEST) -m "not gpu and not slow" --write-seconds

slow: install
	@echo "== slow tests"
	@$(PYTEST) -m "slow and not gpu" $(if $(EVERY),--every-turn)

# But tests/repo, which holds what is written and printed with the pinned versions.
versions: install
	@test -n "$(TORCH)" || { echo "make: which torch? as in make versions TORCH=2.14.1" >&2; exit 2; }
	@$(PYTEST) -m "not gpu and not slow" --ignore tests/repo

# Predictions against published training runs; RUNS=file.json scores another file of them.
accuracy: install
	@$(BIN)/python benchmarks/accuracy.py $(RUNS)

lint: install
	@echo "== format"
	@$(BIN)/ruff format --check $(CODE)
	@echo "== lint"
	@$(BIN)/ruff check $(CODE)
	@echo "== types"
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

# The published schema of plan.json; a test holds the file against the code.
schema: install
	@$(BIN)/python -m meshfold.plan_file.schema > compiler/plan_file/plan.schema.json.new
	@mv compiler/plan_file/plan.schema.json.new compiler/plan_file/plan.schema.json

# The real output of the commands in README.md and docs/, and the tables of folders; tests hold them.
readme: install
	@PYTHONPATH=tests $(BIN)/python -m support.readme

install: $(LINKED)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: meshfold needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d" " -f2); say make PYTHON=/path/to/a/newer/python" >&2; exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing meshfold and its dependencies (torch is large: some minutes the first time)"
	@sed -e '' $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d') constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev]" $(STRICT)
	@rm -f $(VENV)/linked-*
	@touch $@ $(LINKED)

$(LINKED): $(INSTALLED)
	@test -e $@ || { \
	  echo "== linking added, moved or deleted files" && rm -f $(VENV)/linked-* && \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e . $(STRICT); }
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
