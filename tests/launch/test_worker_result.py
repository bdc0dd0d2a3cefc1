"""The result of a worker's function on its way through a pipe."""

from __future__ import annotations

import os
import threading

import pytest

from telegrad.errors import PayloadError
from telegrad.launch.worker_result import WorkerResult, write_error, write_value


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


class NotUnpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def transmit(write: object, content: object) -> WorkerResult:
    read_end, write_end = os.pipe()
    write(write_end, content)  # type: ignore[operator]  # one of the two functions above
    os.close(write_end)
    result = WorkerResult()
    while piece := os.read(read_end, 7):
        assert not result.complete()
        result.feed(piece)
    os.close(read_end)
    result.close()
    return result


def test_a_value_arrives() -> None:
    result = transmit(write_value, {"a": [1, None]})
    assert result.complete()
    assert not result.is_error()
    assert result.value() == {"a": [1, None]}


def test_a_value_that_cannot_be_pickled_is_refused_before_any_write() -> None:
    with pytest.raises(PayloadError, match="what the function returned, a lock, cannot be pickled"):
        write_value(-1, threading.Lock())


def test_an_exception_arrives_with_its_traceback() -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        result = transmit(write_error, error)
    assert result.is_error()
    raised = result.raised()
    assert raised.summary == "KeyError: 'lost'"
    assert "test_an_exception_arrives_with_its_traceback" in raised.traceback
    error = raised.unpickle()
    assert isinstance(error, KeyError)
    assert error.args == ("lost",)


@pytest.mark.parametrize("error", [Unpicklable("text"), NotUnpicklable(1, 2)])
def test_an_exception_that_cannot_be_unpickled_is_reported_as_text(error: Exception) -> None:
    raised = transmit(write_error, error).raised()
    assert raised.unpickle() is None
    assert str(error) in raised.summary
    assert str(error) in raised.traceback


def test_a_truncated_result_is_not_complete() -> None:
    read_end, write_end = os.pipe()
    write_error(write_end, KeyError("lost"))
    os.close(write_end)
    sent = os.read(read_end, 65536)
    os.close(read_end)
    truncated = WorkerResult()
    assert not truncated.complete()
    truncated.feed(sent[:-1])
    assert not truncated.complete()
    assert not truncated.is_error()
