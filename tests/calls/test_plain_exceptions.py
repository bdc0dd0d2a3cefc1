from __future__ import annotations

import builtins
import pickle
from typing import Any

import pytest
import torch

from telegrad import errors
from telegrad.calls.plain_exceptions import decode_exception, encode_exception
from telegrad.errors import CallError, DeadlineExceeded, RemoteError, WorkersFailed
from telegrad.wire.plain_encode import encode


class Mine(Exception):
    pass


class MineValueError(ValueError):
    pass


class Spoof(Exception):
    """Has the name of a builtin exception."""


Spoof.__module__, Spoof.__qualname__ = "builtins", "ValueError"


def there_and_back(error: BaseException) -> tuple[Exception | None, str]:
    return decode_exception(encode_exception(error).value.data)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError(("a", 1)),
        FileNotFoundError(2, "No such file"),
        StopIteration({"x": [1]}),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ZeroDivisionError(),
        AssertionError("x", None, 1.5),
        errors.PayloadError("x cannot be sent"),
        errors.UnknownWorker("who"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_builtin_exceptions_and_telegrads_own_keep_type_and_arguments(error: Exception) -> None:
    received, _ = there_and_back(error)
    assert type(received) is type(error)
    assert received.args == error.args
    assert str(received) == str(error)


@pytest.mark.parametrize(("start", "end"), [(-(2**40), 1 - 2**40), (-1, 0), (1, 2), (2**40, 2**40 + 1), (1, 0)])
@pytest.mark.parametrize("kind", ["UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError"])
def test_positions_outside_of_a_unicode_error_are_refused(kind: str, start: int, end: int) -> None:
    # str() of such a UnicodeDecodeError would read memory outside of its bytes, and could end the process.
    text = {
        "UnicodeDecodeError": ("utf-8", b"x"),
        "UnicodeEncodeError": ("utf-8", "x"),
        "UnicodeTranslateError": ("x",),
    }
    received, reason = decode_exception(encode((f"builtins.{kind}", (*text[kind], start, end, "bad"), {}, [])).data)
    assert received is None
    assert reason == f"a {kind} with positions outside its object"


def test_a_call_error_keeps_what_identifies_the_call() -> None:
    error = DeadlineExceeded("late", worker="b", function="f", call=3, context=7, elapsed=1.5)
    received, _ = there_and_back(error)
    assert isinstance(received, DeadlineExceeded)
    assert vars(received) == vars(error)


def test_a_remote_error_keeps_the_name_of_the_type() -> None:
    error = RemoteError("it raised", worker="c")
    error.type_name, error.remote_traceback = "x.Y", "secret"
    received, _ = there_and_back(error)
    assert isinstance(received, RemoteError)
    assert (received.type_name, received.remote_traceback) == ("x.Y", "")


def test_an_error_of_several_workers_keeps_its_text() -> None:
    received, _ = there_and_back(WorkersFailed("two failed", errors={"b": ValueError("x")}))
    assert isinstance(received, WorkersFailed)
    assert (str(received), received.errors) == ("two failed", {})


def test_notes_arrive() -> None:
    error = ValueError("no")
    error.add_note("see the manual")
    received, _ = there_and_back(error)
    assert received is not None
    assert received.__notes__ == ["see the manual"]


@pytest.mark.parametrize("error", [Mine("x"), MineValueError("x"), Spoof("x"), KeyboardInterrupt(), SystemExit(1)])
def test_all_others_arrive_as_text(error: BaseException) -> None:
    encoded = encode_exception(error)
    assert encoded.value.data == b""
    assert encoded.text == str(error)
    received, why = decode_exception(b"")
    assert received is None
    assert "keep their type" in why


def test_arguments_that_are_not_plain_arrive_as_their_text() -> None:
    for argument in (object(), torch.ones(2), [print]):
        received, _ = there_and_back(ValueError(argument, 1))
        assert type(received) is ValueError
        assert received.args == (str(ValueError(argument, 1)),)


def test_an_error_whose_text_cannot_be_sent_arrives_as_text_of_the_failure() -> None:
    received, _ = there_and_back(OSError("name \ud800"))
    assert type(received) is OSError
    assert received.args == ("name \\ud800",)


def test_a_name_that_cannot_be_sent_gives_no_data() -> None:
    error = ValueError("x")
    error.add_note("\ud800")
    assert encode_exception(error).value.data == b""


@pytest.mark.parametrize(
    "parts",
    [
        ("builtins.eval", ("1",), {}, []),
        ("builtins.SystemExit", (1,), {}, []),
        ("builtins.KeyboardInterrupt", (), {}, []),
        ("builtins.ExceptionGroup", ("x", []), {}, []),
        ("os.system", ("true",), {}, []),
        ("telegrad.errors.is_shortage", ("x",), {}, []),
        ("telegrad.errors._rebuild_call_error", ("x",), {}, []),
        ("telegrad.errors.CallError", (), {}, []),
        ("telegrad.errors.CallError", (1,), {}, []),
        ("telegrad.errors.CallError", ("x", "y"), {}, []),
        ("builtins.ValueError", ["x"], {}, []),
        ("builtins.ValueError", ("x",), [], []),
        ("builtins.ValueError", ("x",), {}, {}),
        ("builtins.UnicodeDecodeError", ("x",), {}, []),
        (["builtins.ValueError"], ("x",), {}, []),
        (5, ("x",), {}, []),
        "builtins.ValueError",
        None,
        5,
        (),
    ],
    ids=str,
)
def test_data_that_names_something_else_makes_no_exception(parts: Any) -> None:
    received, why = decode_exception(encode(parts).data)
    assert received is None
    assert why


def test_wrong_attributes_are_left_out() -> None:
    data = encode(("telegrad.errors.CallError", ("x",), {"worker": 5, "call": "y", "__class__": 1}, [7])).data
    received, _ = decode_exception(data)
    assert type(received) is CallError
    assert (received.worker, received.call, received.__notes__) == (None, None, ["7"])


def test_pickled_data_makes_no_exception() -> None:
    received, why = decode_exception(pickle.dumps(ValueError("x")))
    assert received is None
    assert "not plain data" in why


def test_every_builtin_exception_is_in_the_table_or_known_to_be_left_out() -> None:
    left_out = {
        *("BaseExceptionGroup", "ExceptionGroup", "ChildProcessError", "SyntaxError", "IndentationError", "TabError"),
        *("SystemError", "EnvironmentError", "IOError"),
    }
    for name, kind in vars(builtins).items():
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning):
            known = decode_exception(encode((f"builtins.{name}", ("x",), {}, [])).data)[1] == ""
            known = known or name.startswith("Unicode")
            assert known != (name in left_out), name
