"""Random programs over several workers give the gradients, None pattern, hook calls and errors of one process."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.program_processes import check_programs

from telegrad import launch
from telegrad.testing.programs import FEATURES, chosen
from telegrad.testing.soak import run_seed

BLOCK = 25


def run(first: int, count: int, only: list[str] | None = None) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found[run_seed(seed, chosen(only))] += 1
        except BaseException as error:
            option = f" --only {','.join(only)}" if only else ""
            error.add_note(f"run it alone: python -m telegrad.testing.soak --first {seed} --seeds 1 --shrink{option}")
            raise
    return found


@pytest.mark.parametrize("block", range(12))
def test_in_simulation_every_program_equals_one_process(block: int) -> None:
    found = run(block * BLOCK, BLOCK)
    assert found["equal, with a probe"] > 0, "programs that need no probe do not show that it works"


@pytest.mark.parametrize("feature", FEATURES)
def test_programs_that_all_have_one_feature_equal_one_process(feature: str) -> None:
    found = run(0, 80, [feature])
    compared = found["equal, with a probe"] + found["equal, no probe"]
    assert compared > 60, f"too many ended early: {found}"


@pytest.mark.parametrize(
    "features", [["inputs", "passes"], ["subclasses", "grad_modes"], ["views", "dtypes"]], ids="+".join
)
def test_programs_with_features_that_meet_equal_one_process(features: list[str]) -> None:
    found = run(0, 60, features)
    compared = found["equal, with a probe"] + found["equal, no probe"]
    assert compared > 40, f"too many ended early: {found}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_on_real_processes_every_program_equals_one_process(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    assert launch.local(check_programs, 4, (1_000_000, 50), timeout=150)[0] == []
