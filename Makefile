# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
TESTS  ?= tests
# Warnings of build tools are about packaging, not for whoever installs.
PIP    := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What a user needs, and what tests need beside it: PyTorch among them, gigabytes where its wheel brings CUDA.
STAMP     := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# The accelerator lane: Python 3.12 or newer, the oldest JAX that can compile our GPU kernels and the newest we have tried. Compilers
# are pinned, since what they said is kept (tests/accelerator/proofs.py): to go to newer ones, change them here, `make aot-all`.
AOT_PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)
AOT_TESTS  ?= tests/accelerator
AOT_MATRIX := $(addprefix tests/kernels/test_,tpu_attention.py tpu_hidden_pages.py tpu_mla.py latent_backends.py batch_invariance.py)
AOT_OLDEST := 0.11.2
AOT_NEWEST := 0.12.0.1
AOT_PTXAS  := 13.5.37
AOT_PTXAS_OLDEST := 13.0.88
# Processes that tests run in: one per core of a small machine.
JOBS       ?= 2
# Of `make fuzz` and `make fuzz-api`.
MINUTES    ?= 30
SEED       ?= 1

# What a server needs beside JAX and Hugging Face's libraries, for a machine without network that has only those.
DEVICE_PACKAGES := llguidance msgspec pyzmq fastapi uvicorn httptools pydantic
DEVICE_PLATFORMS := 2_28 2_27 2_26 2_24 2_17 2_12 2_5
DEVICE_WHEELS := .device-wheels

.PHONY: help setup demo serve debian-tools test families deployments tunix fuzz fuzz-api aot aot-setup aot-all lint types device-wheels device-programs \
	device-dry-run docs docs-serve clean

help:            ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxserve needs Python 3.11 or newer: set PYTHON to one"; exit 1; }
	@echo "Installing jaxserve in $(VENV): a minute or two, about 0.9 GB."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) --editable .
	@touch $@

$(DEV_STAMP): $(STAMP) pyproject.toml
	@echo "Installing what the tests need in $(VENV), PyTorch among it."
	@$(PIP) --editable '.[dev]'
	@touch $@

setup: $(DEV_STAMP)  ## create .venv and install jaxserve with its development tools

demo: $(STAMP)   ## serve the built-in model, stream a few answers, stop
	@$(BIN)/python examples/demo.py

serve: $(STAMP)  ## serve the built-in model until Ctrl-C
	@$(BIN)/jaxserve serve demo

debian-tools:    ## install chromium, prometheus and systemd, which tests drive, from Debian where they are missing
	@sh scripts/debian_tools.sh

test: $(DEV_STAMP)  ## run the tests that need no Python 3.12
	@sh scripts/debian_tools.sh || echo "The tests that need them will fail."
	$(BIN)/python -m pytest --hypothesis-profile ci -n $(JOBS) --dist loadfile -m "not matrix" --ignore tests/accelerator $(TESTS)

families: $(DEV_STAMP)  ## every model family under all that serving does to it, against Transformers: an hour on two cores
	$(BIN)/python -m pytest -n $(JOBS) -m matrix tests/scheduler/test_family_matrix.py tests/scheduler/test_model_parity.py tests/models \
		tests/e2e/test_live_parity.py

deployments: $(DEV_STAMP)  ## every kind of request, and new weights, of hosts, fronts, stages and shards, crowds, LoRA: a quarter of an hour on two cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m matrix tests/e2e/test_live_everything.py tests/e2e/test_live_weights.py \
		tests/e2e/test_live_weight_files.py tests/e2e/test_live_crowds.py tests/e2e/test_live_lora.py

tunix: .venv-tunix/.installed  ## rollouts for tunix, against its own models and with its GRPO learner: two minutes, after an install of 1.6 GB
	.venv-tunix/bin/python -m pytest tests/integrations

.venv-tunix/.installed: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable . google-tunix==0.1.7 \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	@touch $@

fuzz: $(STAMP)   ## abuse a server for 30 minutes (MINUTES=, SEED=) and say what it did not stand: docs/testing.md
	$(BIN)/python -m benchmarks.abuse --minutes $(MINUTES) --seed $(SEED)

fuzz-api: MINUTES = 10
fuzz-api: $(DEV_STAMP)  ## put requests made from /openapi.json to a server for 10 minutes (MINUTES=, SEED=): none may be a server error
	$(BIN)/python -m benchmarks.abuse.api --minutes $(MINUTES) --seed $(SEED)

aot: aot-setup   ## interpret kernels, compile them and whole steps for H200 and TPU: what has changed, and a few always
	.venv-aot/bin/python -m pytest --only-changed -n $(JOBS) $(AOT_TESTS) $(AOT_MATRIX)
	PTXAS=.venv-aot/ptxas/nvidia/cu13/bin/ptxas .venv-aot/bin/python -m pytest --only-changed -n $(JOBS) $(AOT_TESTS)/test_gpu_*.py -m compile
	.venv-aot-latest/bin/python -m pytest --only-changed -n $(JOBS) $(AOT_TESTS) -m compile

aot-setup: .venv-aot/.installed .venv-aot/ptxas .venv-aot-latest/.installed  ## create the environments of `make aot`

aot-all:         ## the same with everything; after `make aot` or this, commit tests/accelerator/records
	rm -rf tests/accelerator/records
	$(MAKE) aot

.venv-aot/.installed: JAX_PIN := $(AOT_OLDEST)
.venv-aot-latest/.installed: JAX_PIN := $(AOT_NEWEST)
.venv-aot/.installed .venv-aot-latest/.installed: pyproject.toml
	@test -n "$(AOT_PYTHON)" || { echo "make aot needs Python 3.12 or newer: set AOT_PYTHON to one"; exit 1; }
	@test -x $(@D)/bin/python || $(AOT_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[aot]' 'jax[cuda13,tpu]==$(JAX_PIN)' \
		'nvidia-cuda-nvcc==$(AOT_PTXAS)' 'nvidia-nvjitlink==$(AOT_PTXAS)'
	@touch $@

.venv-aot/ptxas: .venv-aot/.installed
	rm -rf $@
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ nvidia-cuda-nvcc==$(AOT_PTXAS_OLDEST)

device-wheels:   ## collect the wheels that benchmarks.device carries to a machine without network (Python 3.12, x86-64)
	rm -rf $(DEVICE_WHEELS)
	$(AOT_PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.12 \
		--implementation cp $(DEVICE_PLATFORMS:%=--platform manylinux_%_x86_64) --platform manylinux2014_x86_64 \
		--dest $(DEVICE_WHEELS) $(DEVICE_PACKAGES)
	@du -sm $(DEVICE_WHEELS) | awk '{ print $$1 " MiB of wheels in " $$2; exit $$1 > 64 }'

device-programs: .venv-aot/.installed  ## compile what benchmarks.device carries to an H200 in .device-programs
	.venv-aot/bin/python -m benchmarks.device.carry

device-dry-run: device-wheels .venv-device/.installed  ## run every section of benchmarks.device in such a machine's environment, on the CPU
	rm -rf .device-dry-run
	.venv-device/bin/python -m benchmarks.device --smoke --out .device-dry-run --wheels $(DEVICE_WHEELS)

.venv-device/.installed: benchmarks/device/dry_run_packages.txt
	@test -x $(@D)/bin/python || $(AOT_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

docs: .venv-docs/.installed  ## write the documentation as a site into site/, which needs no server
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build
	@echo "site/index.html"

docs-serve: .venv-docs/.installed  ## show the documentation at http://127.0.0.1:8000 while it is written
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs serve --dev-addr 127.0.0.1:8000

.venv-docs/.installed: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep -oE 'mkdocs-material[^"]*' pyproject.toml | head -1)"
	@touch $@

lint: $(DEV_STAMP)  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)  ## mypy
	$(BIN)/mypy

clean:           ## remove what setup and tests left behind
	rm -rf $(VENV) .venv-aot .venv-aot-latest .venv-tunix .venv-device .venv-docs $(DEVICE_WHEELS) .device-programs .device-dry-run site .jax_cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
