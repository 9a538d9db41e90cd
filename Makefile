# make demo | test | test-all | models | fuzz | check | cuda | bench | planner | format | clean; each installs what it needs into .venv first.
# `make check test` runs both.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-all models fuzz check cuda bench planner format install clean
.DEFAULT_GOAL := demo

demo: $(INSTALLED)
	$(BIN)/python examples/gpt2.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow"

models: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/test_models.py

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --programs 2000 --seed 0 --jobs 2

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_layout.py

cuda: $(INSTALLED)
	$(BIN)/python examples/benchmarks/cuda_acceptance.py

bench: $(INSTALLED)
	$(BIN)/python examples/benchmarks/peers.py

planner: $(INSTALLED)
	$(BIN)/python examples/benchmarks/planner.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fxremat needs Python 3.11 or newer, and '$(PYTHON)' is not:" \
	    "name one that is, such as 'make PYTHON=python3.11'." >&2; exit 1; }
	@echo "fxremat: making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "fxremat: installing torch, ortools and the rest into .venv (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e ".[test,progress,examples,plot,dev]"
	@touch $@
	@echo "fxremat: installed"

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
