from __future__ import annotations

import os
import threading

import pytest

from telegrad.launch.report import Report, write_error, write_value


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


class NotRebuildable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def carried(write: object, content: object) -> Report:
    read_end, write_end = os.pipe()
    write(write_end, content)  # type: ignore[operator]  # one of the two functions above
    os.close(write_end)
    report = Report()
    while piece := os.read(read_end, 7):
        assert not report.complete()
        report.feed(piece)
    os.close(read_end)
    report.close()
    return report


def test_a_value_arrives() -> None:
    report = carried(write_value, {"a": [1, None]})
    assert report.complete()
    assert not report.is_error()
    assert report.value() == {"a": [1, None]}


def test_a_value_that_cannot_be_pickled_is_refused_before_anything_is_written() -> None:
    with pytest.raises(TypeError):
        write_value(-1, threading.Lock())


def test_an_exception_arrives_with_its_traceback() -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        report = carried(write_error, error)
    assert report.is_error()
    raised = report.raised()
    assert raised.summary == "KeyError: 'lost'"
    assert "test_an_exception_arrives_with_its_traceback" in raised.traceback
    rebuilt = raised.rebuild()
    assert isinstance(rebuilt, KeyError)
    assert rebuilt.args == ("lost",)


@pytest.mark.parametrize("error", [Unpicklable("text"), NotRebuildable(1, 2)])
def test_an_exception_that_cannot_be_rebuilt_is_still_told_as_text(error: Exception) -> None:
    raised = carried(write_error, error).raised()
    assert raised.rebuild() is None
    assert str(error) in raised.summary
    assert str(error) in raised.traceback


def test_a_report_that_was_cut_short_is_not_complete() -> None:
    whole = carried(write_value, "some text")
    cut = Report()
    assert not cut.complete()
    cut.feed(bytes(whole._bytes[:-1]))
    assert not cut.complete()
    assert not cut.is_error()
