"""`breakpoint()` and `input()` of a worker without a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from telegrad.environment.terminal import explain_input, no_breakpoint, without_terminal
from telegrad.errors import TelegradError


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_NAME", "ps")


def test_breakpoint_says_how_to_get_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in without_terminal({}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TelegradError, match=r"breakpoint\(\) on worker 'ps'.*`telegrad run --attach ps"):
        sys.__breakpointhook__()
    with pytest.raises(TelegradError):
        no_breakpoint()


def test_input_says_how_to_get_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = io.StringIO("one\n")
    monkeypatch.setattr(sys, "stdin", empty)
    monkeypatch.setattr(sys, "__stdin__", empty)
    explain_input({})
    assert sys.stdin is empty
    explain_input(without_terminal({}))
    assert input() == "one"
    with pytest.raises(EOFError, match=r"input\(\) on worker 'ps'.*`telegrad run --attach ps"):
        input()
    assert sys.stdin.read() == ""
    explain_input(without_terminal({}))  # of the next init_rpc
    assert sys.stdin.__class__.__name__ == "_NoTerminal"


def test_input_says_so_where_multiprocessing_has_opened_dev_null_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        explain_input(without_terminal({}))
        with pytest.raises(EOFError, match=r"input\(\) on worker 'ps'"):
            input()


def test_a_file_that_the_program_reads_as_its_input_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "answers").write_text("yes\n")
    with (tmp_path / "answers").open() as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        explain_input(without_terminal({}))
        assert sys.stdin is answers


def test_the_debugger_of_the_user_is_kept() -> None:
    assert "PYTHONBREAKPOINT" not in without_terminal({"PYTHONBREAKPOINT": "mine.debug"})
