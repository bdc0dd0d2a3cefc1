"""Exceptions that are kept, and raised again and again."""

from __future__ import annotations

import pytest

from telegrad.calls.reraise import another
from telegrad.errors import DeadlineExceeded


class Odd(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left = left


class OddFile(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "not there", name)


class Changing(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"<{text}>")


class Stubborn(Exception):
    def __new__(cls, *args: object) -> Stubborn:
        if not args:
            raise ValueError("no")
        return super().__new__(cls)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3),
        KeyError("k"),
        OSError(2, "not there", "file"),
        ImportError("m", name="n"),
        Odd(1, 2),
        OddFile("file"),
        Changing("x"),
        DeadlineExceeded("late", worker="b", elapsed=2.0),
        ExceptionGroup("both", [ValueError(1), KeyError(2)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_is_equal_and_not_the_same(error: Exception) -> None:
    error.add_note("a note")
    other = another(error)
    assert other is not error
    assert type(other) is type(error)
    assert other.args == error.args
    assert str(other) == str(error)
    assert other.__dict__ == error.__dict__
    for name in ("filename", "errno", "name", "worker", "elapsed", "left", "exceptions"):
        assert getattr(other, name, None) == getattr(error, name, None)


def test_an_exception_that_cannot_be_made_again_is_raised_itself() -> None:
    error = Stubborn("x")
    error.args = ()
    assert another(error) is error
