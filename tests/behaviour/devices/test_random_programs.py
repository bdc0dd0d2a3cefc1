"""Random programs with leaves and values on devices equal one process, which runs them on torch's device threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from telegrad.backward import island_runs
from telegrad.testing.programs import DEVICES, FEATURES
from telegrad.testing.soak import run_seed

pytestmark = pytest.mark.usefixtures("sim")
BLOCK = 25


def run(seeds: range, features: Mapping[str, float] = FEATURES) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found[run_seed(seed, {**features, DEVICES: 1.0})] += 1
        except BaseException as error:
            error.add_note(f"run it alone: python -m telegrad.testing.soak --devices --first {seed} --seeds 1 --shrink")
            raise
    return found


@pytest.mark.parametrize("block", range(12))
def test_every_program_equals_one_process(block: int) -> None:
    found = run(range(block * BLOCK, (block + 1) * BLOCK))
    assert found["equal, with a probe"] > 0, "programs that need no probe do not show that it works"


def test_passes_that_run_on_threads_of_devices_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_runs, "use_engine_threads", lambda _: None)
    with pytest.raises(AssertionError, match=r"a plain backward\(\) reached a tensor"):
        run(range(5), {})
