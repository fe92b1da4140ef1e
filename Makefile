# make venv   only create .venv (PYTHON=... picks the interpreter)
# make demo   train a small GPT on 2 processes with ZeRO-3 (under 4 minutes)
# make test   the whole test suite, on the CPU
# make bench  training beside DeepSpeed, FSDP2 and DDP (9 minutes; ARGS=--quick for a trial)
# make fuzz   10,000 edits of configurations, each refused by its path or trained (about 10 minutes)
# make bench-loop  what an Accelerator adds to a loop, beside Hugging Face Accelerate (2 minutes)
# make bench-optimizers  an optimizer step alone, beside torch's fused AdamW (20 seconds)
# make check  linter, type check, tests
#
# Each creates .venv from requirements.lock when it is missing or the lock is newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
PIP := $(BIN)/pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test bench bench-loop bench-optimizers fuzz lint check clean

help:
	@sed -n 's/^# make /make /p' Makefile

venv: $(READY)

# --no-deps: the lock is complete, and nothing may bring another torch. Where pip's torch is the CUDA build (Linux
# outside a CPU-only index), its CUDA libraries are not in the lock, so they are installed by torch's own pins.
$(READY): requirements.lock requirements-peer.lock pyproject.toml
	@echo "making $(VENV) from requirements.lock, about a minute"
	@$(PYTHON) -c 'import sys; sys.exit("shardwise needs Python >= 3.10; this is " + sys.version.split()[0] + ". Set PYTHON=...") if sys.version_info < (3, 10) else 0'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --no-deps -r requirements.lock
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "this torch is built for CUDA: installing its libraries"; \
		$(PIP) install -q "$$(grep '^torch==' requirements.lock)"; }
	@$(BIN)/python -c 'import torch' || { echo "torch cannot be imported: see above"; exit 1; }
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@rm -rf $(VENV)/peer
	@$(PIP) install -q --no-deps --target $(VENV)/peer -r requirements-peer.lock
	@touch $(READY)

demo: $(READY)
	@$(BIN)/shardwise demo

test: $(READY)
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest

$(BENCH_READY): $(READY) requirements-bench.lock
	@echo "adding requirements-bench.lock to $(VENV)"
	@$(PIP) install -q --no-deps -r requirements-bench.lock
	@touch $(BENCH_READY)

bench: $(BENCH_READY)
	@$(BIN)/python benchmarks/train.py $(ARGS)

fuzz: $(READY)
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/test_fuzz.py --fuzz 10000 --timeout 3600

bench-loop: $(READY)
	@$(BIN)/python benchmarks/loop.py $(ARGS)

bench-optimizers: $(READY)
	@$(BIN)/python benchmarks/optimizers.py $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/mypy --strict

check: lint test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
