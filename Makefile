# make setup   a virtual environment in .venv with everything in it
# make demo    the main job for about a minute, with a worker killed in the middle
# make check   lint, and the tests that start no job: for every edit
# make test    what every change must pass       (make test PYTEST_ARGS="-k layering -x" for some)
# make simulate   thousands of random jobs and faults in simulated time   (SEEDS="0 100000": the first, and how many)
# make soak    all tests in full: those marked `soak` too, and more examples of all others; then jobs that meet 1,000 random faults
#              (make faults FAULTS="--faults 50 --seed 3 --json soak.json": the faults alone, and the table as JSON)
# make conformance   torchrun's contract (LAUNCHER=torchrun make conformance: the same tests against torchrun)
# make lint    ruff and mypy --strict
# make bench   every benchmark                   (make bench BENCH_ARGS=--quick for small versions)
#
# Each sets up what it needs first. A second `make setup` does nothing until setup.cfg, pyproject.toml or the constraints change.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := train,test,lint

# Another torch than the pinned one, for all further calls: export TORCH=torch==2.12.1
TORCH ?= $(shell grep '^torch==' constraints.txt)
# A package index that offers torch's CPU build, for machines without an NVIDIA GPU; not set: torch is what pip offers.
TORCH_CPU_INDEX ?=

# On two quiet cores these tests take about a sixth of this; one test has the limit that pyproject.toml gives.
TEST_LIMIT_S ?= 3900
SOAK_LIMIT_S ?= 7200
# Most tests wait for processes that start, so two more at a time than there are cores. PYTEST_PARALLEL= for one by one.
PYTEST_PARALLEL ?= --numprocesses=$(shell expr $$(nproc) + 2) --dist=worksteal
# Tests that start no job compute, and each process imports torch first.
UNIT_PARALLEL ?= --numprocesses=$(shell expr $$(nproc) + 1) --dist=worksteal
PYTEST_ARGS ?=
BENCH_ARGS ?=
SEEDS ?= 0 10000
FAULTS ?= --faults 1000
# The programs that print a table: they import the reporter.
BENCHMARKS = $(shell grep -l '^from benchmarks.report import' benchmarks/*.py)


.PHONY: help setup demo check unit test simulate soak faults conformance lint bench FORCE
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/s/^# //p' Makefile

setup: $(VENV)/.complete

demo: setup
	$(BIN)/python examples/demo.py

# At the limit pytest stops after the test under way, and fails; `timeout` is for a test that no signal wakes.
test: setup
	timeout --foreground --signal=INT --kill-after=30 $$(($(TEST_LIMIT_S) + 180)) \
	  $(BIN)/python -m pytest --session-timeout=$(TEST_LIMIT_S) $(PYTEST_PARALLEL) $(PYTEST_ARGS)

soak:
	$(MAKE) test TEST_LIMIT_S=$(SOAK_LIMIT_S) PYTEST_ARGS='--soak $(PYTEST_ARGS)'
	$(MAKE) faults

faults: setup
	$(BIN)/python -m tests.soak $(FAULTS)

simulate: setup
	$(BIN)/python -m tests.simulation $(SEEDS)

check: setup
	$(MAKE) --jobs=2 --output-sync=target lint unit

unit: setup
	$(BIN)/python -m pytest $(UNIT_PARALLEL) -m 'not job' $(PYTEST_ARGS) tests/unit tests/simulation

conformance: setup
	$(BIN)/python -m pytest --timeout=400 $(PYTEST_ARGS) tests/conformance

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	set -e; for program in $(BENCHMARKS); do echo "== $$program"; PYTHONPATH=. $(BIN)/python $$program $(BENCH_ARGS); done

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "elaunch needs Python 3.11 or newer: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The constraints with the chosen torch, written anew only when they differ.
$(VENV)/constraints.txt: FORCE | $(BIN)/python
	@{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# No build isolation: what builds the package is pinned like everything else and fetched once.
$(VENV)/.complete: setup.cfg pyproject.toml $(VENV)/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt setuptools wheel
	@test -z '$(TORCH_CPU_INDEX)' || command -v nvidia-smi >/dev/null || \
	  $(BIN)/python -m pip install --quiet --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@sync  # gigabytes have been written: what follows would wait for the disk
	@touch $@
