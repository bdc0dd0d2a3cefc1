"""The command `python -m fuzz`."""

from __future__ import annotations

import sys

import pytest

from fuzz import __main__ as command


def test_without_atheris_the_command_fails_and_names_make_fuzz(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "frames", "--seconds", "1"])
    assert command.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "python -m fuzz: atheris is not installed; run `make fuzz`, which installs it first.\n"
