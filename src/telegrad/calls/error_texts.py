"""What is told of an exception. It is the user's, so making a text of it may fail, and the text may not be sendable."""

from __future__ import annotations

import traceback
from types import TracebackType


def text_of(error: BaseException) -> str:
    """What it says."""
    try:
        return sendable(str(error))
    except Exception:  # noqa: BLE001 - a __str__ of the user's that fails must not hide the error
        return f"<{type(error).__name__} whose text cannot be made>"


def traceback_of(error: BaseException, trace: TracebackType | None) -> str:
    """Where it comes from, and what it says, as Python shows it."""
    try:
        return sendable("".join(traceback.format_exception(type(error), error, trace)))
    except Exception as failure:  # noqa: BLE001 - the caller must get its answer even if this one cannot be shown
        return f"{type(error).__name__}: {text_of(error)} (its traceback cannot be shown: {sendable(repr(failure))})"


def sendable(text: str) -> str:
    r"""The text, with half characters escaped: a file name that is no UTF-8 has some, and no message can hold them.

    >>> sendable("name \ud800")
    'name \\ud800'
    """
    return text.encode(errors="backslashreplace").decode()


def explain(error: BaseException) -> None:
    """Add what telegrad knows of an error of torch's that a received tensor caused."""
    if type(error) is RuntimeError and "storage that is not resizable" in text_of(error):
        error.add_note(
            "A tensor that was received lies in the memory of its message, which cannot grow or be freed: call "
            "clone() on it before resize_(), before it is the out= of an operation with a larger result, and before "
            "its storage is resized."
        )
