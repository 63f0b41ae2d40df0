# M*: `make serve` and `make test` are all that is needed; both set themselves up.
#
#   MODEL=name|folder|file.gguf   what `make serve` loads      (default: smollm2-135m-instruct)
#   PORT=8000                     where `make serve` listens
#   VENV=.venv                    where the environment lies
#   PYTHON=python3.12             which Python makes it

MODEL ?= smollm2-135m-instruct
PORT ?= 8000
VENV ?= .venv
ARGS ?=

export VENV
BIN := $(VENV)/bin
# One thread per process: on few cores more threads of the maths libraries only wait for each other.
TESTENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup setup-test serve stop test test-all lint types floors suite format docs lock clean

help:
	@echo "make serve       set up, fetch the default model, start the daemon, stream one answer, keep serving"
	@echo "make stop        stop that daemon"
	@echo "make test        set up, then lint, types, import floors and the whole CPU suite"
	@echo "make test-all    the same with the long matrices"
	@echo "make format      let ruff put the code in shape"
	@echo "make docs        write the generated tables of docs/ anew"
	@echo "make lock        write constraints.txt anew from the environment"
	@echo "make clean       remove the environment and caches of the tools"

setup:
	@sh tools/setup/setup.sh run

setup-test:
	@sh tools/setup/setup.sh test

serve: setup
	@$(BIN)/python -m tools.setup.serve --model "$(MODEL)" --port "$(PORT)" $(ARGS)

stop:
	@$(BIN)/mstar stop

lint:
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "some files are not in shape: make format"; exit 1; }

types:
	@echo "== mypy --strict"
	@$(BIN)/mypy

floors:
	@echo "== import floors"
	@$(BIN)/lint-imports --no-cache

suite:
	@echo "== tests"
	@$(TESTENV) $(BIN)/python -m pytest $(ARGS)

test: setup-test lint types floors suite

# An empty -m replaces the default selection, which leaves the long matrices out.
test-all: setup-test lint types floors
	@echo "== tests, long matrices included"
	@$(TESTENV) $(BIN)/python -m pytest -m "not gpu" --timeout 900 $(ARGS)

format: setup-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup-test
	@$(BIN)/python -m mstar.validation.document docs/api-fields.md
	@$(BIN)/python -m mstar.config.describe --write docs/configuration.md

lock: setup-test
	@$(BIN)/python -m tools.setup.lock

clean:
	rm -rf $(VENV) $(VENV).lock *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
