"""The command that runs universes."""

from __future__ import annotations

import pytest

from telegrad.testing import simulate


def test_it_counts_seeds(capfd: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "6", "--jobs", "1"]) == 0
    assert "6 seeds" in capfd.readouterr().out


def test_it_prints_the_story_of_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seed", "5"]) == 0
    shown = capsys.readouterr().out
    assert "seed 5" in shown
    assert "ends shutdown" in shown


def test_it_fails_with_the_story_if_a_rule_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seed", "2", "--without", "ack-rule"]) == 1
    shown = capsys.readouterr().out
    assert "Violated:" in shown
    assert "--seed 2" in shown
