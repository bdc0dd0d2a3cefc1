# `make demo` and `make test` set up everything they need.
PYTHON ?= python3.11
SEEDS ?= 5000
SECONDS ?= 600
MINUTES ?= 10
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes. Without caches each would compile the sources again, for 0.25 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-network lint coverage conformance soak endurance simulate fuzz bench bench-check clean

setup: $(VENV)/.ready

# hatchling is installed first and the build is not isolated: an isolated build ignores the constraints and could
# download another torch.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[demo,dev]"
	touch $@

# DEVICE=cuda, or another accelerator, puts the layers on devices; DEVICE=sim on simulated ones.
demo: setup
	$(BIN)/python examples/demo.py --device $(DEVICE)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/protocol --ignore=tests/wire
	$(MAKE) coverage

# Faults of networks, hosts and processes, and captured traffic, in network namespaces. Takes 10 minutes. Needs root,
# iproute2 and tshark.
test-network: setup
	TELEGRAD_TEST_NETWORK=1 $(BIN)/python -m pytest -s tests/behaviour/network \
		tests/behaviour/security/test_network_capture.py

# Runs the tests of protocol/ and wire/ under coverage, and fails unless they reach every line and branch.
coverage: setup
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 --dist worksteal tests/protocol tests/wire
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

conformance: setup
	$(BIN)/python -m conformance
	$(BIN)/python -m conformance --simulate

soak: setup
	$(BIN)/python -m telegrad.testing.soak --seeds $(SEEDS)

# A group of four processes with a fault every two seconds, that must not fail or grow.
endurance: setup
	$(BIN)/python -m telegrad.testing.endurance --minutes $(MINUTES)

# Whole programs with every fault. WITHOUT names a rule of the protocol to switch off, which must be noticed.
simulate: setup
	$(BIN)/python -m telegrad.testing.simulate --seeds $(SEEDS) $(if $(WITHOUT),--without $(WITHOUT) --stop)

# Atheris is not part of `make setup`: it is large, and the tests replay the corpus without it.
$(VENV)/.atheris: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[fuzz]"
	touch $@

# SECONDS in all, shared equally by the targets. TARGETS names some of them.
fuzz: $(VENV)/.atheris
	$(BIN)/python -m fuzz $(TARGETS) --seconds $(SECONDS)

bench: setup
	$(BIN)/python benchmarks/everything.py

bench-check: setup
	$(BIN)/python benchmarks/check.py

clean:
	rm -rf $(VENV) .fuzz .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
