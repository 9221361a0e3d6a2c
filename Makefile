# The two commands a newcomer needs: make serve, make test. All set-up happens in .venv and under build/.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup serve test quick lint lock test-rollout image test-image clean

WORKERS ?= 2
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
MODEL ?= smollm2-135m
VARIANT ?= cpu
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CREATED := $(VENV)/.created
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

setup: $(DEVELOPMENT) ## make .venv with run-time packages, development tools, bench peers and the GPU compiler

serve: $(RUNTIME) ## fetch and convert the small model, build its programs, serve on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/zccp build --model $(MODEL)
	@exec $(BIN)/zccp serve --model $(MODEL) --host 127.0.0.1

test: $(DEVELOPMENT) ## run the whole test suite in two processes; make test WORKERS=N for more
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder --durations 40

quick: $(DEVELOPMENT) ## run the tests that start no real model and none of the repository checks
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder -m "not system" --ignore tests/repo

test-rollout: $(DEVELOPMENT) ## install, update, break and roll back a fleet of containers; Debian, root, up to half an hour
	ZCCP_TEST_ROLLOUT=1 $(BIN)/python -m pytest tests/rollout

image: $(DEVELOPMENT) ## make a bootable image of the appliance and its signed release in build/image; Debian, root, some minutes
	$(BIN)/python -m images.build --variant $(VARIANT)

test-image: $(DEVELOPMENT) ## build the cpu image, boot it without KVM, ask, restart, update and break it; Debian, root, long
	ZCCP_TEST_IMAGE=1 $(BIN)/python -m pytest tests/image

lint: $(DEVELOPMENT) ## run the repository checks: format, types, layers, sizes, documents
	$(BIN)/python -m pytest tests/repo

lock: $(DEVELOPMENT) ## choose the newest allowed versions and write the lock files
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --output-file requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra cuda12 --quiet --upgrade --universal --python-version 3.11 \
		--constraint requirements.lock --generate-hashes --no-emit-index-url --no-annotate --no-header \
		--output-file requirements-cuda12.lock
	$(BIN)/uv pip compile --group dev --group peers --quiet --upgrade --universal --python-version 3.11 \
		--constraint requirements.lock --no-emit-index-url --no-annotate --no-header \
		| grep -vE '^(nvidia-|cuda-|triton==)' > requirements-dev.lock
	$(BIN)/uv pip compile pyproject.toml --extra aot --no-deps --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-annotate --no-header \
		| grep -E '^(jax-cuda12-|nvidia-cuda-nvcc-)' > requirements-aot.lock

clean: ## remove .venv, build outputs and caches; fetched models under build/ go, those of `make serve` stay
	rm -rf $(VENV) build dist zccp.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is missing or older\
	 than Python 3.11; install python3.11 or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments;\
	 install its venv package (Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUNTIME): $(CREATED) requirements.lock pyproject.toml
	$(PIP) install --quiet --requirement requirements.lock
	$(PIP) install --quiet --no-deps --editable .
	@touch $@

$(DEVELOPMENT): $(RUNTIME) requirements-dev.lock requirements-aot.lock
	$(PIP) install --quiet --requirement requirements-dev.lock
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/aot --requirement requirements-aot.lock
	@$(BIN)/pyright --version > /dev/null
	@touch $@
