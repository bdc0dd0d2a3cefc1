"""The command `python -m fuzz`."""

from __future__ import annotations

import sys
from pathlib import Path

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


@pytest.mark.parametrize("verbose", [False, True])
def test_the_counts_are_read_whether_the_output_is_shown_or_not(
    verbose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzzer = tmp_path / "fuzzer"
    fuzzer.write_text("#!/bin/sh\necho 'cov: 3 ft: 4 corp: 5/6b'\necho 'stat::number_of_executed_units: 7' >&2\n")
    fuzzer.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fuzzer))
    output = command._run("frames", 1, verbose=verbose)
    assert command._EXECUTIONS.findall(output) == ["7"]
    assert command._STATUS.findall(output) == [("3", "4", "5")]
    assert ("number_of_executed_units" in capsys.readouterr().err) == verbose
