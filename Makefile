# `make quickstart` shows that it works, `make test` proves it, `make examples` fine-tunes a tiny model.
# All set up .venv first.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

# Tests start many processes, which read the bytecode that the first one writes.
export PYTHONDONTWRITEBYTECODE :=

EXAMPLES = sft lora qlora dpo grpo tools
SOURCES = src tests benchmarks examples

.PHONY: quickstart examples $(EXAMPLES:%=example-%) test test-slow test-all test-exhaustive lint format clean

quickstart: .venv/base
	$(BIN)/maxtext train quickstart
	@echo "to use the command maxtext in this shell: source $(BIN)/activate"

# Fine-tune a tiny model in six ways; make example-sft, example-lora, example-qlora, example-dpo,
# example-grpo and example-tools run one. Results and plots are in maxtext_output/examples/.
examples: .venv/base
	for name in $(EXAMPLES); do $(BIN)/python examples/$$name.py || exit; done

$(EXAMPLES:%=example-%): example-%: .venv/base
	$(BIN)/python examples/$*.py

PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Every capability once.
test: lint
	$(PYTEST) -m "not slow and not exhaustive"

# Further cases and whole processes. A change must pass both: `make test test-slow`, or `make test-all`.
test-slow: .venv/test
	$(PYTEST) -m "slow and not exhaustive"

test-all: lint
	$(PYTEST)

# The whole matrices as well: every layout of every model, more kills. Before a release.
test-exhaustive: lint
	$(PYTEST) -m ""

lint: .venv/test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

# Also writes base.yml and docs/keys.md from configs/types.
format: .venv/test
	$(BIN)/python -m maxtext.configs.base_file
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "maxtext needs Python 3.11 or newer; set PYTHON, e.g. make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/base: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[plot]"
	@touch $@

.venv/test: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[test]"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
