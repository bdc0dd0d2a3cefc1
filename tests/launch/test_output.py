"""Prefixed lines of the workers' output."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from telegrad.launch import output
from telegrad.launch.output import LoggedOutput, PrefixedLines, UnchangedOutput, prefixes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*pieces: bytes, prefix: bytes = b"a | ") -> bytes:
    raw = io.BytesIO()
    lines = PrefixedLines(prefix, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    return raw.getvalue()


def test_every_line_begins_with_the_prefix() -> None:
    assert printed(b"one\ntwo\n\nthree\n") == b"a | one\na | two\na | \na | three\n"


def test_a_line_in_pieces_is_printed_as_one_line() -> None:
    assert printed(b"on", b"e", b"\ntw", b"o\n") == b"a | one\na | two\n"


def test_an_incomplete_line_is_printed_at_the_end() -> None:
    assert printed(b"one\ntwo") == b"a | one\na | two\n"


def test_no_output_prints_nothing() -> None:
    assert printed() == b""


def test_a_very_long_line_is_not_broken() -> None:
    long = b"x" * 3_000_000
    assert printed(*[long[i : i + 65536] for i in range(0, len(long), 65536)], b"\nnext\n") == (
        b"a | " + long + b"\na | next\n"
    )


def test_an_endless_line_is_broken_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE", 10)
    assert printed(b"12345", b"67890", b"abc\n") == b"a | 1234567890\na | abc\n"


def test_bytes_that_are_not_text_are_unchanged() -> None:
    assert printed(b"\xff\xfe\x00 caf\xc3", b"\xa9\n") == b"a | \xff\xfe\x00 caf\xc3\xa9\n"


def test_a_text_stream_gets_text() -> None:
    stream = io.StringIO()
    PrefixedLines(b"a | ", stream).feed(b"ok \xff\n")
    assert stream.getvalue() == "a | ok \\xff\n"


def test_unchanged_output_keeps_characters_that_come_in_pieces() -> None:
    stream, raw = io.StringIO(), io.BytesIO()
    for target in (stream, io.TextIOWrapper(raw, encoding="ascii", write_through=True)):
        consumer = UnchangedOutput(target)
        for piece in (b"caf\xc3", b"\xa9 \xff", b"!\n"):
            consumer.feed(piece)
        consumer.close()
    assert stream.getvalue() == "caf\N{LATIN SMALL LETTER E WITH ACUTE} \\xff!\n"
    assert raw.getvalue() == b"caf\xc3\xa9 \xff!\n"


def test_output_for_nobody_is_dropped() -> None:
    (prefix,) = prefixes(["a"], None)
    assert prefix == b"a | "
    lines = PrefixedLines(prefix, None)
    lines.feed(b"one\ntwo")
    lines.close()


def test_prefixes_have_the_same_width() -> None:
    assert prefixes(["ps", "trainer0"], io.StringIO()) == [b"ps       | ", b"trainer0 | "]


def test_each_worker_has_a_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert prefixes(["a", "b"], Terminal()) == [b"\x1b[36ma | \x1b[0m", b"\x1b[33mb | \x1b[0m"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert prefixes(["a", "b"], Terminal()) == [b"a | ", b"b | "]


def test_a_progress_bar_is_printed_now_and_then_and_when_it_is_complete() -> None:
    raw, now = io.BytesIO(), [0.0]
    lines = PrefixedLines(b"a | ", io.TextIOWrapper(raw, encoding="utf-8", write_through=True), lambda: now[0])
    for percent in range(0, 101, 10):
        lines.feed(b"\r %3d%%|##" % percent)
        now[0] += 0.5
    lines.feed(b"\nnext\n")
    lines.close()
    assert raw.getvalue().decode().splitlines() == [
        "a |    0%|##",
        "a |   40%|##",
        "a |   80%|##",
        "a |  100%|##",
        "a | next",
    ]


def test_a_progress_bar_that_was_just_printed_is_not_printed_again() -> None:
    assert printed(b"\r100%", b"\n") == b"a | 100%\n"
    assert printed(b"\r100%", b"\n100%\n") == b"a | 100%\na | 100%\n"


def test_lines_that_end_like_those_of_windows_are_unchanged() -> None:
    assert printed(b"one\r\ntwo\r", b"\n") == b"a | one\r\na | two\r\n"


def test_logged_output_is_in_the_file_as_it_came(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with open(tmp_path / "a.log", "ab", buffering=0) as file:
        lines = PrefixedLines(b"a | ", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
        logged = LoggedOutput(lines, file)
        logged.feed(b"one\n\r 10%\r")
        assert (tmp_path / "a.log").read_bytes() == b"one\n\r 10%\r"
        logged.close()
    assert raw.getvalue().startswith(b"a | one\n")


def test_output_is_still_printed_when_its_file_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    raw = io.BytesIO()
    lines = PrefixedLines(b"a | ", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    with open("/dev/full", "ab", buffering=0) as file:
        logged = LoggedOutput(lines, file)
        logged.feed(b"one\n")
        logged.feed(b"two\n")
    assert raw.getvalue() == b"a | one\na | two\n"
    said = capsys.readouterr().err
    assert said.count("the rest of the output is not in /dev/full") == 1
    assert "No space left on device" in said
