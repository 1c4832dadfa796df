# `make demo` and `make test` are all a newcomer needs; `make check` is what a change must pass before it is tested.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/draftwire/v1/*.proto)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt
SOURCES := draftwire target_service draft_service client tests benchmarks soak compose

.PHONY: demo test check exact unit bench soak protos check-protos format clean

demo: $(VENV)/.demo
	$(BIN)/draftwire demo

# One BLAS thread a process, and a file of tests at a time on each of two cores, in the order of tests/conftest.py.
export DRAFTWIRE_THREADS ?= 1
PARALLEL ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(BIN)/draftwire models pull smollm2-135m
	$(MAKE) --jobs 2 check exact
	@echo "== everything else"
	$(BIN)/python -m pytest -q -m "not exact" $(PARALLEL)
	@echo "== a minute of abuse"
	$(MAKE) soak SOAK_S=60

# Laws, bit for bit, on tiny models: with the reference BLAS, in processes of their own. `test` runs it beside `check`,
# most of which is one process.
exact: $(VENV)/.dev
	@echo "== laws, bit for bit"
	DRAFTWIRE_BLAS=reference $(BIN)/python -m pytest -q -m exact $(PARALLEL)

check: $(VENV)/.dev check-protos
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench: lists the benchmarks. make bench NAME=lookup: runs one (see benchmarks/README.md).
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(NAME)

# Ten minutes of abuse of real processes (see docs/deployment.md); `make soak SOAK_S=60` is the short one.
SOAK_S ?= 600
soak: $(VENV)/.dev
	$(BIN)/draftwire models pull smollm2-135m
	$(BIN)/python -m soak --seconds $(SOAK_S)

protos: $(VENV)/.dev
	cd protos && ../$(BIN)/buf format -w
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

# Lint, format, compatibility with the released contract, and stubs that are what the protos give.
check-protos: $(VENV)/.dev
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format -d --exit-code && ../$(BIN)/buf breaking --against released.binpb
	rm -rf build/protos && mkdir -p build/protos
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/protos \
	  --grpc_python_out=build/protos --mypy_out=quiet:build/protos --mypy_grpc_out=quiet:build/protos $(PROTOS)
	@for file in build/protos/draftwire/v1/*; do \
	  cmp "$$file" "draftwire/v1/$$(basename $$file)" || { echo "stale stubs: run 'make protos'"; exit 1; }; done
	@echo "protos: clean, compatible, stubs up to date"

format: $(VENV)/.dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	@echo "== making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --upgrade pip

# On Linux mlx needs a backend: the CPU one, unless DRAFTWIRE_EXTRA=cuda says otherwise.
comma := ,
EXTRAS := target,draft$(if $(filter Darwin,$(shell uname -s)),,$(comma)$(or $(DRAFTWIRE_EXTRA),cpu))

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing draftwire [$(EXTRAS)]"
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $@

# All that .demo has too: on a clean clone one installation does for both.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing draftwire [$(EXTRAS)], constrained output and the tools for tests"
	$(PIP) --editable ".[$(EXTRAS),grammar,dev]"
	@touch $@ $(VENV)/.demo
