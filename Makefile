# Everything a fresh machine needs; each target does its own set-up and may be run again.
#   make up [ARGS="--prefill 2"]   start a cluster on this machine
#   make test                      checks, and every test that needs no GPU
#   make compose-test               the cluster in containers; ENGINE=podman, or COMPOSE=… BUILD=… for other commands
#   make bench                     beside vLLM, llama.cpp and transformers: half an hour, writes docs/peers.md; ARGS=--quick
#   make chaos                     30 minutes of random faults, see docs/reliability.md; ARGS="--minutes 5 --streams 20"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup up check test test-clients fuzz sanitize gpu-test compose-test chaos bench format lock clean

PYTHON := python3.11 python3 python3.12 python3.13 python3.14
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := gateway prefill_worker decode_worker kvstore kernels common compose
SOURCES := $(PACKAGES) tests benchmarks hatch_build.py
NATIVE := $(wildcard kernels/cpu/native/*.[ch]) kernels/cpu/native/build.py hatch_build.py
INSTALLED := $(VENV)/.installed
CLIENTS := .venv-clients
PEERS := .venv-peers

# One thread for each library's pool: what is tested are results, and several processes share the cores.
# Triton kernels run in their interpreter, also where there is a GPU: that is for gpu-test.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TRITON_INTERPRET=1

help:
	@sed -n '2,6s/^# *//p' Makefile

setup: $(INSTALLED)

$(INSTALLED): requirements/lock.txt requirements/dev.txt pyproject.toml requirements/make_venv.sh $(NATIVE)
	@sh requirements/make_venv.sh $(VENV) $(PYTHON)
	@touch $@

up: setup
	@$(BIN)/baton up $(ARGS)

check: setup
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(TEST_ENV) $(BIN)/python -m pytest -m "not gpu and not clients" $(ARGS)

test-clients: setup $(CLIENTS)/.installed
	$(TEST_ENV) BATON_CLIENTS_PYTHON=$(CLIENTS)/bin/python $(BIN)/python -m pytest -m clients $(ARGS)

$(CLIENTS)/.installed: requirements/clients.txt
	$(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet -r requirements/clients.txt
	@touch $@

fuzz: setup
	$(TEST_ENV) BATON_FUZZ_SECONDS=600 BATON_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/integration/test_gateway/test_openapi.py $(ARGS)

# The compiled CPU kernels under the address and undefined-behaviour sanitizers: minutes.
sanitize: setup
	$(TEST_ENV) $(BIN)/python -m tests.kernels.sanitize $(ARGS)

gpu-test: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

compose-test: setup
	@ENGINE="$(ENGINE)" BUILD="$(BUILD)" COMPOSE="$(COMPOSE)" $(BIN)/python -m tests.compose

chaos: setup
	$(TEST_ENV) $(BIN)/python -m tests.chaos.soak $(ARGS)

bench: setup
	@$(BIN)/python -m benchmarks.peers --home $(PEERS) $(ARGS)

format: setup
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lock:
	sh requirements/lock.sh

clean:
	rm -rf $(VENV) $(CLIENTS) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
