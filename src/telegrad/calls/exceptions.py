"""Exceptions on their way between workers: to text and bytes on one side, back to an exception on the other.

An exception belongs to the user, so making a text of it may fail, the text may not be encodable, and its class may not
be picklable. None of that may hide the exception: the caller then gets a RemoteError with the text and the traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import torch

from telegrad.calls.call import Call
from telegrad.calls.tracebacks import RemoteTraceback as RemoteTraceback  # for its users
from telegrad.calls.tracebacks import format_folded, note_place
from telegrad.errors import FunctionNotFound, PayloadError, RemoteError, TelegradError
from telegrad.wire import payload
from telegrad.wire.encoded import Encoded
from telegrad.wire.frames import Message
from telegrad.wire.messages import Failure
from telegrad.wire.tensors import TensorDescriptor, decode_tensors

_log = logging.getLogger("telegrad")


# -- to text --------------------------------------------------------------------------------------------------


def text_of(error: BaseException) -> str:
    """Return the message of an exception."""
    try:
        return sendable(str(error))
    except Exception:  # noqa: BLE001 - a failing __str__ of the user's must not hide the error
        return f"<{type(error).__name__}: str() failed>"


def traceback_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception with its traceback, formatted as Python does, with telegrad's frames folded."""
    try:
        return sendable(format_folded(error, trace))
    except Exception as failure:  # noqa: BLE001 - the caller must get its reply even if this one cannot be formatted
        return f"{type(error).__name__}: {text_of(error)} (its traceback cannot be shown: {sendable(repr(failure))})"


def sendable(text: str) -> str:
    r"""Return the text with lone surrogates escaped: file names that are not UTF-8 have some, and messages cannot.

    >>> sendable("name \ud800")
    'name \\ud800'
    """
    return text.encode(errors="backslashreplace").decode()


def explain(error: BaseException) -> None:
    """Add a note to a torch error caused by a received tensor."""
    if type(error) is RuntimeError and "storage that is not resizable" in text_of(error):
        error.add_note(
            "A received tensor lies in the memory of its message, which cannot grow or be freed: call clone() on it "
            "before resize_(), before using it as out= of an operation with a larger result, and before resizing its "
            "storage."
        )


# -- to bytes -------------------------------------------------------------------------------------------------


class EncodedException(msgspec.Struct, frozen=True):
    """An exception as bytes. The value is empty if it cannot be sent as anything but text."""

    type_name: str
    text: str
    value: Encoded


def pickle_exception(error: BaseException) -> EncodedException:
    """Turn an exception into bytes and text."""
    value = Encoded(b"", [])
    if isinstance(error, Exception):
        try:
            encoded = payload.encode(error, main_by_name=True, root="error", edges=False)
            if not encoded.references:  # an error is stored in many places, and would keep them alive
                # Without history: that of an error is not recorded, and a leaf would look as if it had none.
                parts = [part.detach() if isinstance(part, torch.Tensor) else part for part in encoded.attachments]
                value = Encoded(encoded.data, parts)
        except Exception as failure:  # noqa: BLE001 - then the receiver gets the text
            _log.debug("%s cannot be pickled: %s", type(error).__name__, failure)
    return EncodedException(sendable(f"{type(error).__module__}.{type(error).__qualname__}"), text_of(error), value)


def unpickle_exception(
    data: bytes | memoryview, descriptors: Sequence[TensorDescriptor] = (), region: Any = None
) -> tuple[Exception | None, str]:
    """Turn bytes back into an exception; None and the reason if that cannot be done."""
    if not data:
        return None, "its class cannot be pickled"
    try:
        error = payload.decode(data, decode_tensors(descriptors, region) if descriptors else [])
    except PayloadError as reason:
        return None, str(reason)
    return (error, "") if isinstance(error, Exception) else (None, "its class cannot be pickled")


class ExceptionCodec(msgspec.Struct, frozen=True):
    """How the exceptions of a group travel."""

    encode: Callable[[BaseException], EncodedException]
    decode: Callable[..., tuple[Exception | None, str]]
    """As `unpickle_exception`."""
    tracebacks: bool
    """Whether the text of the traceback is sent."""


PICKLED = ExceptionCodec(pickle_exception, unpickle_exception, tracebacks=True)
"""How exceptions travel if all values may be pickled."""


def exception_of(call: Call, failure: Failure, message: Message, codec: ExceptionCodec = PICKLED) -> Exception:
    """Return the exception that the callee reported for a call."""
    about: Any = {"worker": call.worker, "function": call.function, "call": call.id}
    if failure.not_found:
        return FunctionNotFound(
            f"worker {call.worker!r} cannot run {call.function or 'the function'}: {failure.text}", **about
        )
    error, why = codec.decode(message.data, failure.attachments, message.region)
    if error is None:
        remote = RemoteError(
            f"{call.function or 'the function'} raised {failure.type_name} on worker {call.worker!r}: {failure.text}\n"
            f"(it arrives as a RemoteError because {why})" + (f"\n\n{failure.traceback}" if failure.traceback else ""),
            **about,
        )
        remote.type_name = failure.type_name
        remote.remote_traceback = failure.traceback
        return remote
    if failure.traceback:
        remote_traceback = RemoteTraceback(call.worker, failure.traceback).followed_by(error)
        # Of an error of telegrad, nothing is shown if no frame of the program raised it, but a timer, for example.
        if remote_traceback.shown or not isinstance(error, TelegradError):
            error.__cause__ = remote_traceback
        note_place(error, call.worker, call.function, failure.traceback)
    else:
        error.add_note(
            f"(raised by {call.function or 'the function'} on worker {call.worker!r}, which has the traceback)"
        )
    return error
