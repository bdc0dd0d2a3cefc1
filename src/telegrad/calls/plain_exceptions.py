"""Exceptions in registered mode: a name, a text and plain arguments, of which the receiver makes an exception.

Only builtin exceptions and telegrad's own keep their type. The receiver looks the name up in a fixed table, so a sender
cannot choose what is called. Tracebacks show source code and paths, so they stay on the worker that raised.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Sequence
from typing import Any

from telegrad import errors
from telegrad.calls.exceptions import EncodedException, ExceptionCodec, sendable, text_of
from telegrad.errors import CallError, PayloadError, ProtocolError, RemoteError, TelegradError, WorkersFailed
from telegrad.wire import plain_decode, plain_encode
from telegrad.wire.encoded import Encoded
from telegrad.wire.tensors import TensorDescriptor

_log = logging.getLogger("telegrad")

WHY_NOT = "in registered mode only builtin exceptions and telegrad's own keep their type"

_BUILTINS = (
    *("ArithmeticError", "AssertionError", "AttributeError", "BlockingIOError", "BrokenPipeError", "BufferError"),
    *("ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "EOFError"),
    *("Exception", "FileExistsError", "FileNotFoundError", "FloatingPointError", "ImportError", "IndexError"),
    *("InterruptedError", "IsADirectoryError", "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError"),
    *("NameError", "NotADirectoryError", "NotImplementedError", "OSError", "OverflowError", "PermissionError"),
    *("ProcessLookupError", "RecursionError", "ReferenceError", "RuntimeError", "StopAsyncIteration", "StopIteration"),
    *("TimeoutError", "TypeError", "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeError"),
    *("UnicodeTranslateError", "ValueError", "ZeroDivisionError"),
)
_TABLE: dict[str, type[Exception]] = {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS} | {
    f"telegrad.errors.{name}": kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TelegradError)
}
_WITH_POSITIONS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
_ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "worker": (str,),
    "function": (str,),
    "call": (int,),
    "context": (int,),
    "elapsed": (float, int),
}
"""Attributes of a CallError that are sent, and their types."""


def encode_exception(error: BaseException) -> EncodedException:
    """Turn an exception into a name, a text, and its arguments if they are plain."""
    name = sendable(f"{type(error).__module__}.{type(error).__qualname__}")
    value = Encoded(b"", [])
    if _TABLE.get(name) is type(error):
        value = _encode(name, error)
    return EncodedException(name, text_of(error), value)


def _encode(name: str, error: BaseException) -> Encoded:
    attributes = {key: getattr(error, key) for key in _ATTRIBUTES} if isinstance(error, CallError) else {}
    if isinstance(error, RemoteError):
        attributes["type_name"] = error.type_name
    args = error.args if not isinstance(error, TelegradError) else (text_of(error),)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    for arguments in (args, (text_of(error),)):
        try:
            encoded = plain_encode.encode((name, arguments, attributes, notes), root="error")
        except PayloadError as failure:
            _log.debug("the arguments of %s are not plain: %s", name, failure)
        else:
            if not encoded.attachments and not encoded.references:
                return encoded
    return Encoded(b"", [])


def decode_exception(
    data: bytes | memoryview, descriptors: Sequence[TensorDescriptor] = (), region: Any = None
) -> tuple[Exception | None, str]:
    """Make an exception of the name and arguments that a worker sent; None and the reason if that cannot be done."""
    if not data:
        return None, WHY_NOT
    try:
        error = _make(plain_decode.decode(data, ()))
    except (PayloadError, ProtocolError) as reason:
        return None, str(reason)
    except Exception as reason:  # noqa: BLE001 - the constructor refuses the arguments
        return None, f"{type(reason).__name__}: {reason}"
    return (error, "") if error is not None else (None, WHY_NOT)


def _make(parts: Any) -> Exception | None:
    name, args, attributes, notes = parts
    kind = _TABLE.get(name) if type(name) is str else None
    if kind is None or type(args) is not tuple or type(attributes) is not dict or type(notes) is not list:
        return None
    if issubclass(kind, TelegradError) and (len(args) != 1 or type(args[0]) is not str):
        return None
    error: Exception
    if issubclass(kind, CallError):
        known = {key: attributes.get(key) for key, types in _ATTRIBUTES.items() if type(attributes.get(key)) in types}
        error = kind(args[0], **known)
        type_name = attributes.get("type_name")
        if isinstance(error, RemoteError) and type(type_name) is str:
            error.type_name = type_name
    elif issubclass(kind, WorkersFailed):
        error = kind(args[0])
    else:
        error = kind(*args)
        if isinstance(error, _WITH_POSITIONS) and not 0 <= error.start <= error.end <= len(error.object):
            # CPython trusts them: str() of a UnicodeDecodeError reads the byte at `start`, wherever that is.
            raise ProtocolError(f"a {kind.__name__} with positions outside its object")
    for note in notes:
        error.add_note(str(note))
    return error


PLAIN = ExceptionCodec(encode_exception, decode_exception, tracebacks=False)
"""How exceptions travel in registered mode."""
