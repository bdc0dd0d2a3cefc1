"""What other workers say reaches a terminal without its control characters."""

from __future__ import annotations

import io

import msgspec
import pytest

from telegrad.observe.commands.common import print_json, rich_tables, table
from telegrad.observe.model import GroupView, LiveCall, Wait, WorkerView
from telegrad.observe.printable import printable
from telegrad.observe.story import render as render_story
from telegrad.observe.story import story_of_call
from telegrad.observe.stuck import analyze
from telegrad.observe.stuck_text import render as render_stuck

HOSTILE = "f\x1b]0;owned\x07\x9b2J\u202e\r"


def group() -> GroupView:
    call = LiveCall(1, "b", "a", HOSTILE, 0.0, None, None, 0, "running")
    wait = Wait("reply", ("b",), 0.0, HOSTILE, 0, None, None)
    view = WorkerView(*("a", 0, 1, 0, "host", 1, (), 10.0, 0.0, 0.0), served=(call,), waits=(wait,))
    return GroupView((view,), {"b": HOSTILE}, {}, {}, 10.0)


def is_clean(text: str) -> bool:
    return not any(char in text for char in "\x1b\x07\x9b\u202e\r")


def test_everything_that_is_not_printed_as_itself_is_escaped() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xD800, 0xFFFF):
        if chr(code) not in "\t\n":
            assert printable(chr(code)).isascii(), hex(code)
            assert printable(chr(code)).isprintable(), hex(code)
    assert printable("größer <lambda> 日本\n\tx") == "größer <lambda> 日本\n\tx"


def test_reports_and_stories_are_clean() -> None:
    report = render_stuck(analyze(group()))
    story = render_story(story_of_call(group(), ("b", 1)))
    assert is_clean(report)
    assert is_clean(story)
    assert "\\x1b]0;owned" in report
    assert "\\x1b]0;owned" in story


def test_tables_and_json_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_clean(table(["a"], [[HOSTILE], ["two\nlines"]]))
    assert len(table(["a"], [["two\nlines"]]).splitlines()) == 2
    print_json({"a": HOSTILE})
    out = capsys.readouterr().out
    assert is_clean(out.replace("\u202e", ""))  # JSON shows that one as it is
    assert msgspec.json.decode(out) == {"a": HOSTILE}


def test_json_is_valid_where_the_output_has_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", output)
    print_json({"function": "größe 🦆"})
    output.flush()
    assert msgspec.json.decode(output.buffer.getvalue()) == {"function": "größe 🦆"}  # type: ignore[attr-defined]  # it is a BytesIO


def test_names_are_no_markup_for_rich() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    console.print(*rich_tables(["a"], [["[/nothing] [bold]list[int][/bold]" + HOSTILE]], 200))
    text = console.file.getvalue()
    assert "[/nothing] [bold]list[int][/bold]" in text
    assert is_clean(text)
