# Everything below runs from a fresh clone: the first target that needs it makes `.venv`. With PYTHON=..., a `.venv` of
# another version is made anew; without, the one that is there will do.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USED := $(or $(if $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(PYTHON))
VERSION := $(shell $(USED) -c 'import sys; print(*sys.version_info[:2], sep=".")')
READY := $(VENV)/.ready-$(VERSION)
PREPARED := $(VENV)/.prepared

LAB := measurements quality bench bench-gpu first-light kernels mutations fuzz test-arm test-clients sanitize-gpu

.PHONY: chat demo test test-all check format catalogue clean $(LAB)

chat: $(PREPARED)
	$(BIN)/lowbit-chat

demo: $(READY)
	$(BIN)/lowbit-chat run demo "What can you do?"

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not slow"

# Long grids, every picture, other processors' code and kills too.
test-all: $(READY)
	$(PYTEST)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The texts to translate, and what was translated, compiled.
catalogue: $(READY)
	$(BIN)/python -m tests.catalogue

# What measures, breaks and disturbs the program: `make measurements`, `bench`, `mutations`, `fuzz` and others.
$(LAB): $(READY)
	$(MAKE) -C tests/lab $@

$(READY): pyproject.toml
	$(USED) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowbit-chat needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python$(VERSION) || $(USED) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# The kernels of the bundled model, so that its first answer does not wait for them.
$(PREPARED): $(READY)
	$(BIN)/python -m app.cli.prepare
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
