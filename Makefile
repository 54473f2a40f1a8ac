# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS  ?= tests

.PHONY: help setup demo serve test lint types bench clean

help:            ## show this list
	@grep -E '^[a-z]+: .*##|^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(STAMP)  ## create .venv and install jaxserve with its development tools

demo: $(STAMP)   ## serve the built-in model, stream a few answers, stop
	@$(BIN)/python examples/demo.py

serve: $(STAMP)  ## serve the built-in model until Ctrl-C
	@$(BIN)/jaxserve serve --model-path $$($(BIN)/python -c 'from jaxserve.demo import demo_model_path; print(demo_model_path())')

test: $(STAMP)   ## run all tests
	$(BIN)/python -m pytest $(TESTS)

lint: $(STAMP)   ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

clean:           ## remove what setup and tests left behind
	rm -rf $(VENV) .jax_cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
