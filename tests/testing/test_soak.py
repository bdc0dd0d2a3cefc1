"""The soak: seeds in processes of their own, failures with the program, hangs that end."""

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


def test_a_seed_that_fails_or_kills_its_process_is_reported_and_the_others_run() -> None:
    verdicts = list(soak.run_seeds(0, 8, processes=1, apply=with_fake_seeds))
    assert sorted(verdict.seed for verdict in verdicts) == list(range(8))
    failed = {verdict.seed: verdict.failure for verdict in verdicts if verdict.failure}
    assert failed.keys() == {3, 5}
    assert "it differs" in failed[3]
    assert "its process died" in failed[5]


def test_a_seed_that_hangs_is_reported() -> None:
    (verdict,) = soak.run_seeds(100, 1, processes=1, stalled=0.5, apply=with_fake_seeds)
    assert "no end in 0.5 s" in verdict.failure


def test_the_command_runs_programs_with_the_features_that_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seeds", "5", "--processes", "1", "--only", ""]) == 0
    assert "5 seeds" in capfd.readouterr().out


def test_what_fails_is_shrunk_and_says_how_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(seed: int, programs: list[object]) -> None:
        if any(program.has("op") for program in programs):
            raise AssertionError(f"it differs\n{programs[0]}")

    monkeypatch.setattr(soak, "_check", differ)
    shown = soak.shrunk(2, chosen([]))
    assert shown.startswith("it differs")
    assert len(shown.splitlines()) < 20
