# Everything below runs from a fresh clone: the first target that needs it makes `.venv`. With PYTHON=..., a `.venv` of
# another version is made anew; without, the one that is there will do.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USED := $(or $(if $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(PYTHON))
VERSION := $(shell $(USED) -c 'import sys; print(*sys.version_info[:2], sep=".")')
READY := $(VENV)/.ready-$(VERSION)
PREPARED := $(VENV)/.prepared

.PHONY: chat demo test test-all test-arm check format bench bench-start bench-killing bench-soak pictures bench-tuned bench-prompts bench-speculation bench-rates bench-gpu first-light first-light-more quality kv pages mutations fuzz sanitize-gpu kernels clean

chat: $(PREPARED)
	$(BIN)/lowbit-chat

demo: $(READY)
	$(BIN)/lowbit-chat run demo "What can you do?"

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not slow"

# The program on aarch64 Linux under emulation; needs root, qemu-user-static and debootstrap, and says so.
test-arm: $(READY)
	$(BIN)/python -m tests.emulated

# Long grids, every picture, other processors' code, kills, benchmarks and reports too.
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

bench: $(READY)
	$(BIN)/python -m tests.bench.cpu

bench-start: $(READY)
	$(BIN)/python -m tests.bench.start

bench-killing: $(READY)
	$(BIN)/python -m tests.bench.killing

pictures: $(READY)
	$(BIN)/python -m tests.bench.pictures $(if $(MODEL),--model $(MODEL))

bench-gpu: $(READY)
	$(BIN)/python -m tests.bench.gpu

first-light: $(READY)
	$(BIN)/python -m tests.bench.first_light

first-light-more: $(READY)
	$(BIN)/python -m tests.bench.first_light --slot $(or $(SLOT),1)

bench-soak: $(READY)
	$(BIN)/python -m tests.bench.soak

bench-tuned: $(READY)
	$(BIN)/python -m tests.bench.tuned --write $(if $(SMOLLM2),--smollm2 $(SMOLLM2))

bench-prompts: $(READY)
	$(BIN)/python -m tests.bench.prompts $(if $(SMOLLM2),--stored smollm2=$(SMOLLM2))

bench-rates: $(READY)
	$(BIN)/python -m tests.bench.rates --write $(if $(SMOLLM2),--smollm2 $(SMOLLM2))

bench-speculation: $(READY)
	$(BIN)/python -m tests.bench.speculation --write --out tests/bench/results/speculation.json $(if $(SMOLLM2),--stored $(SMOLLM2))

quality: $(READY)
	$(BIN)/python -m tests.bench.quality $(if $(SMOLLM2),--smollm2 $(SMOLLM2)) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

kv: $(READY)
	$(BIN)/python -m tests.bench.caches $(if $(SMOLLM2),--smollm2 $(SMOLLM2)) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

pages: $(READY)
	$(BIN)/python -m tests.bench.pages

mutations: $(READY)
	$(BIN)/python -m tests.bench.mutations

# READER="gguf template" names some; MINUTES is for each of them, 10 by default; SEED gives the same inputs again.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(READER) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

sanitize-gpu: $(READY)
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu -x tests/runtime/backends/triton
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu -x tests/runtime/backends/triton

kernels: $(READY)
	$(BIN)/python -m tests.bench.kernels

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
