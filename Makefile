# `make demo` and `make test` set up everything they need.
PYTHON ?= python3.11
SEEDS ?= 5000
SECONDS ?= 600
MINUTES ?= 10
DEVICE ?= cpu
# For two cores. Many tests wait for processes, connections and deadlines, and leave their core to others.
TEST_WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes. Without caches each would compile the sources again, for 0.25 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-network test-cluster test-ray test-browser lint ruff mypy layers coverage conformance soak endurance simulate fuzz bench bench-check clean

setup: $(VENV)/.ready

# hatchling is installed first and the build is not isolated: an isolated build ignores the constraints and could
# download another torch.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[demo,dashboard,metrics,otel,dev]"
	touch $@

# DEVICE=cuda, or another accelerator, puts the layers on devices; DEVICE=sim on simulated ones.
demo: setup
	$(BIN)/python examples/demo.py --device $(DEVICE)

lint: setup
	$(MAKE) --jobs 2 --output-sync mypy ruff layers

ruff: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --ignore=tests/protocol --ignore=tests/wire
	$(MAKE) coverage

# Faults of networks, hosts and processes, NAT, IPv6, containers, and captured traffic, in network namespaces. Takes 12
# minutes. Needs root, iproute2, nftables and tshark.
test-network: setup
	TELEGRAD_TEST_NETWORK=1 $(BIN)/python -m pytest -s tests/behaviour/network \
		tests/behaviour/security/test_network_capture.py

$(VENV)/.cluster: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[cluster]"
	touch $@

CLUSTER_PACKAGES := slurm-wlm munge openmpi-bin mpich openssh-server iproute2

# Every launcher on the real software: Slurm, Open MPI, MPICH, torchrun, and sshd in network namespaces. Takes 20 minutes.
# Needs root. Installs its packages if apt-get is there; what is missing is skipped, with a message.
test-cluster: $(VENV)/.cluster
	-command -v apt-get > /dev/null && dpkg -s $(CLUSTER_PACKAGES) > /dev/null 2>&1 \
		|| apt-get install --yes --no-install-recommends $(CLUSTER_PACKAGES)
	TELEGRAD_TEST_CLUSTER=1 $(BIN)/python -m pytest -rs tests/behaviour/cluster tests/launch/test_kubernetes.py

# Ray is not part of `make setup`: it is large.
$(VENV)/.ray: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[ray]"
	touch $@

# Groups on a real Ray cluster with several nodes on this machine, some of which are killed. Takes some minutes.
test-ray: $(VENV)/.ray
	TELEGRAD_TEST_RAY=1 $(BIN)/python -m pytest -v tests/behaviour/ray

BROWSER_PACKAGES := chromium chromium-driver fonts-inter fonts-jetbrains-mono

# The dashboard in a headless Chromium. Renews the screenshots of the docs. Takes two minutes. Installs its packages if
# apt-get is there and this is root; without a browser the tests are skipped.
test-browser: setup
	-command -v apt-get > /dev/null && dpkg -s $(BROWSER_PACKAGES) > /dev/null 2>&1 \
		|| apt-get install --yes --no-install-recommends $(BROWSER_PACKAGES)
	TELEGRAD_TEST_BROWSER=1 TELEGRAD_TEST_PICTURES=1 $(BIN)/python -m pytest -rs tests/behaviour/dashboard

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
