"""`breakpoint()` and `input()` of a worker without a terminal."""

from __future__ import annotations

import io
import sys

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


def test_the_debugger_of_the_user_is_kept() -> None:
    assert "PYTHONBREAKPOINT" not in without_terminal({"PYTHONBREAKPOINT": "mine.debug"})
