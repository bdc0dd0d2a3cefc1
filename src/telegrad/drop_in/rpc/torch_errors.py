"""Converts telegrad's errors to those that programs written for torch expect: the same types and messages.

An exception of a remote function keeps its type. Its message begins with "On WorkerInfo(...)" and ends with the remote
traceback. Torch keeps the types ValueError and TypeError only. Telegrad keeps every type that can be created from a
message alone. The original error of telegrad is the cause.
"""

from __future__ import annotations

import torch

from telegrad.agent.agent import Agent
from telegrad.calls.exceptions import RemoteTraceback
from telegrad.errors import DeadlineExceeded, FunctionNotFound, PayloadError, RemoteError, TelegradError, UnknownWorker

NOT_ON_CALLEE = (
    "Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both caller and callee "
    "modules."
)
NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
WRONG_ASYNC = "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
WRONG_SCRIPT = "Async functions must return an IValue of Future type, but got "
_NO_SCHEMA = "Overloaded torch operator invoked from Python failed to match any schema"


def to_torch_error(error: Exception, agent: Agent, *, builtin: bool = False) -> Exception:
    """Return the error that a program written for torch expects for `error`; `builtin`: an operator was called."""
    if isinstance(error.__cause__, RemoteTraceback):
        return _rebuilt(error, error.__cause__, agent, builtin)
    if isinstance(error, RemoteError):
        text = not_rebuilt("its class cannot be rebuilt here", str(error))
        made: TelegradError = RemoteError(text, worker=error.worker, function=error.function, call=error.call)
    elif isinstance(error, DeadlineExceeded):
        span = "" if error.elapsed is None else f"({round(error.elapsed * 1000)} ms) "
        text = f"RPC ran for more than set timeout {span}and will now be marked with an error: {error}"
        made = DeadlineExceeded(text, worker=error.worker, function=error.function, elapsed=error.elapsed)
    elif isinstance(error, FunctionNotFound):
        made = FunctionNotFound(f"{error} {NOT_ON_CALLEE}", worker=error.worker, function=error.function)
    elif isinstance(error, PayloadError) and error.__cause__ is not None:
        cause = error.__cause__
        kind = (
            RuntimeError if isinstance(cause, torch.jit.Error) else type(cause)
        )  # otherwise the type that pickle raised
        return _with_text(kind, f"{cause} ({error})", error)
    elif isinstance(error, UnknownWorker):
        made = UnknownWorker(f"could not find destination: {error}")
    else:
        return error
    made.__cause__ = error
    return made


def _with_text(kind: type[BaseException], text: str, cause: Exception) -> Exception:
    """Return an exception of that type with that message, or a RuntimeError if that type cannot be created."""
    made: BaseException
    try:
        made = kind(text)
    except Exception as failure:  # noqa: BLE001 - a class that cannot be created from a message alone
        made = RuntimeError(not_rebuilt(str(failure), text))
    if not isinstance(made, Exception):
        made = RuntimeError(text)
    made.__cause__ = cause
    return made


def worker_text(agent: Agent, name: str) -> str:
    """Return a worker's description in torch's format."""
    return f"WorkerInfo(id={agent.peers.find(name).record.id}, name={name})"


def _rebuilt(error: Exception, remote: RemoteTraceback, agent: Agent, builtin: bool) -> Exception:
    text = unescaped(f"On {worker_text(agent, remote.worker)}:\n{error!r}\n{remote.text}")
    if builtin and isinstance(error, TypeError):
        return _with_text(RuntimeError, f"{_NO_SCHEMA}:\n{text}", error)  # torch checks this before the call
    if isinstance(error, torch.jit.Error):
        return _with_text(RuntimeError, text, error)  # torch raises it as one, though the class is not derived from it
    made = _with_text(type(error), text, error)
    if type(made) is type(error):
        made.__dict__.update({**error.__dict__, **made.__dict__})
    return made


def not_rebuilt(why: str, text: str) -> str:
    """Return torch's message for an exception whose class cannot be created here."""
    return f"Failed to create original exception type. Error msg was {why} Original exception on remote side was {text}"


def unescaped(text: str) -> str:
    r"""Return the text with escapes such as ``\n`` decoded, as torch does, and all other characters unchanged."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return text  # a backslash that starts no escape, as in a path
