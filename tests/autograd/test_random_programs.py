"""Random programs over several workers give the gradients, the None pattern and the hook calls of one process."""

from __future__ import annotations

import pytest

from telegrad import launch
from telegrad.testing.processes import check_programs
from telegrad.testing.soak import run_seed

BLOCK = 25


@pytest.mark.parametrize("block", range(12))
def test_in_simulation_every_program_equals_one_process(block: int) -> None:
    probes = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            probes += "with a probe" in run_seed(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}; run it alone with telegrad.testing.soak.run_seed({seed})")
            raise
    assert probes > 0, "programs that need no probe do not show that it works"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_on_real_processes_every_program_equals_one_process(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    assert launch.local(check_programs, 4, (1_000_000, 50), timeout=150)[0] == []
