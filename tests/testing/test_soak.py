"""The soak runs seeds in child processes, and reports failures, crashes and hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from telegrad.testing import soak
from telegrad.testing.programs import chosen


def fake_seed(seed: int, features: object = None) -> str:
    if seed == 3:
        raise AssertionError("it differs")
    if seed == 5:
        os._exit(1)
    if seed == 100:
        threading.Event().wait()
    return "equal, no probe"


@contextmanager
def with_fake_seeds() -> Iterator[None]:
    real, soak.run_seed = soak.run_seed, fake_seed
    try:
        yield
    finally:
        soak.run_seed = real


def test_a_seed_that_fails_or_kills_its_process_is_reported_and_the_others_still_run() -> None:
    results = list(soak.run_seeds(0, 8, processes=1, apply=with_fake_seeds))
    assert sorted(result.seed for result in results) == list(range(8))
    failed = {result.seed: result.failure for result in results if result.failure}
    assert failed.keys() == {3, 5}
    assert "it differs" in failed[3]
    assert "its process died" in failed[5]


def test_a_seed_that_hangs_is_reported() -> None:
    (result,) = soak.run_seeds(100, 1, processes=1, stalled=0.5, apply=with_fake_seeds)
    assert "did not finish in 0.5 s" in result.failure


def test_the_command_runs_programs_with_the_given_features(capfd: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seeds", "5", "--processes", "1", "--only", ""]) == 0
    assert "5 seeds" in capfd.readouterr().out


def test_a_failing_seed_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(seed: int, programs: list[object]) -> None:
        if any(program.has("op") for program in programs):
            raise AssertionError(f"it differs\n{programs[0]}")

    monkeypatch.setattr(soak, "_check", differ)
    shown = soak.shrunk(2, chosen([]))
    assert shown.startswith("it differs")
    assert len(shown.splitlines()) < 20
