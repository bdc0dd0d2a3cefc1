"""Faults of real networks, hosts and processes: what a caller sees of them, in three network namespaces.

The workers use TCP with TLS, as between hosts, and some unix sockets. `make test-network` causes all faults; elsewhere
only the short ones. Skipped without root or iproute2.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.fault_scenarios import SCENARIOS, Scenario, observe
from tests.support.namespaces import why_not


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_caller_gets_its_results_or_an_error_that_names_the_loss(scenario: Scenario, tmp_path: Path) -> None:
    if scenario.slow and os.environ.get("TELEGRAD_TEST_NETWORK") != "1":
        pytest.skip("takes long: `make test-network` runs it")
    if reason := why_not():
        pytest.skip(reason)
    print(observe(scenario, tmp_path).row())
