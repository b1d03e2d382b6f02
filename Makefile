# `make demo` and `make test` are the two commands to know; each sets up .venv the first time.
#
#   PYTHON      the Python that the environment is made from (a torch it has, 2.11 or later, is used and left alone)
#   VENV        where the environment goes
#   TORCH_SPEC  what to install where PYTHON has no torch; for a CUDA build: make demo TORCH_SPEC=torch

PYTHON     ?= python3
VENV       ?= .venv
TORCH_SPEC ?= torch==2.13.0
WORKERS    ?= 2
PYTEST_ARGS ?=

RUN   := $(VENV)/bin/python
READY := $(VENV)/.ready
FAST  := not slow and not fuzz and not conformance and not gpu

# Threads that spin at a barrier starve each other when tests share two cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo test test-slow test-gpu check bench fix clean

help:
	@echo "make demo       train a small model twice over and compare every bit (under 3 minutes)"
	@echo "make test       the fast tests"
	@echo "make check      ruff and mypy --strict"
	@echo "make test-slow  the slow, fuzz and conformance tests"
	@echo "make test-gpu   the checks that need a CUDA device"
	@echo "make bench      the tables under benchmarks/results"

$(READY): pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh "$(PYTHON)" "$(VENV)" "$(TORCH_SPEC)"
	@touch $(READY)

setup: $(READY)

demo: $(READY)
	$(RUN) -m detpass demo $(DEMO_ARGS)

test: $(READY)
	$(RUN) -m pytest -n $(WORKERS) -m "$(FAST)" $(PYTEST_ARGS)

test-slow: $(READY)
	$(RUN) -m pytest -n $(WORKERS) -m "(slow or fuzz or conformance) and not gpu" $(PYTEST_ARGS)

# The interpreter that has the CUDA build runs this one, with no environment of ours in between.
test-gpu:
	$(PYTHON) benchmarks/gpu.py

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

fix: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# With the threads waiting as they do in a user's own training.
bench: $(READY)
	env -u OMP_WAIT_POLICY $(RUN) benchmarks/accumulation.py
	env -u OMP_WAIT_POLICY $(RUN) benchmarks/closed_forms.py
	env -u OMP_WAIT_POLICY $(RUN) benchmarks/compile_time.py
	$(RUN) scripts/fill_readme.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
