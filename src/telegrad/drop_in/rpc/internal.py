"""What torch.distributed.rpc.internal offers to programs: its pickler, its names for ways to call, its profiling keys.

Telegrad encodes calls itself. The pickler here is for programs that pickle by themselves or bring one of their own:
``rpc.api._use_rpc_pickler(pickler)`` has every call that follows pickled by it.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from telegrad.calls.server import DEFERRED
from telegrad.drop_in.rpc.agents import get_current_agent as _get_current_rpc_agent
from telegrad.drop_in.rpc.functions import async_execution
from telegrad.drop_in.rpc.texts import NOT_ON_CALLEE, not_rebuilt, unescaped
from telegrad.wire.torchscript import load_script_module, reducer_for

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function was called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and what it is called with."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """How torch's own workers answer when a function raised."""

    msg: str
    exception_type: type[BaseException]


_pickler: type[pickle.Pickler] = pickle.Pickler
_unpickler: type[pickle.Unpickler] = pickle.Unpickler
"""Programs put others in their place."""

_thread_local_tensor_tables = threading.local()
"""Of the value that this thread is writing or reading: ``send_tables`` and ``recv_tables``, lists of its tensors."""


@contextmanager
def _table(name: str, tensors: Sequence[Any]) -> Iterator[None]:
    """Have `tensors` as the table of that name; the one that a value around this one uses comes back afterwards."""
    before = getattr(_thread_local_tensor_tables, name, None)
    setattr(_thread_local_tensor_tables, name, tensors)
    try:
        yield
    finally:
        if before is None:
            delattr(_thread_local_tensor_tables, name)
        else:
            setattr(_thread_local_tensor_tables, name, before)


class _InternalRPCPickler:
    """Writes a value as bytes and a list of tensors, and reads it back. Programs derive theirs from it."""

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[[Any], Any]] = dict(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return _InternalRPCPickler._tensor_receiver, (_put_into_table(tensor),)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        received: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return received

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        # A reference travels beside the bytes, like a tensor: its owner must hear of it.
        return _InternalRPCPickler._py_rref_receiver, (_put_into_table(py_rref._serialize()),)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: Any) -> Any:
        """The reference; given by its place in the table, or as `RRef._serialize` made it."""
        from telegrad.drop_in.rpc.references import PyRRef

        if isinstance(rref_fork_data, int):
            rref_fork_data = _thread_local_tensor_tables.recv_tables[rref_fork_data]
        return PyRRef._deserialize(rref_fork_data)

    def _rref_reducer(self, rref: Any) -> tuple[Any, ...]:
        return self._py_rref_reducer(rref)

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> Any:
        return load_script_module(script_module_serialized)

    def _script_module_reducer(self, script_module: Any) -> tuple[Any, ...]:
        file = io.BytesIO()
        torch.jit.save(script_module, file)
        return _InternalRPCPickler._script_module_receiver, (file.getvalue(),)

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """The value as bytes, and its tensors."""
        from telegrad.drop_in.rpc.references import PyRRef, RRef

        file = io.BytesIO()
        pickler: Any = _pickler(file)
        pickler.dispatch_table = {
            **self._dispatch_table,
            PyRRef: self._py_rref_reducer,
            RRef: self._rref_reducer,
            **self._class_reducer_dict,
        }
        if isinstance(obj, torch.jit.ScriptModule):
            pickler.dispatch_table[type(obj)] = self._script_module_reducer
        elif isinstance(obj, torch.jit.ScriptFunction):
            pickler.dispatch_table[type(obj)] = reducer_for(type(obj))
        tensors: list[torch.Tensor] = []
        with _table("send_tables", tensors):
            pickler.dump(obj)
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """The value again. A name that cannot be found comes back as an AttributeError, as in torch."""
        with _table("recv_tables", tensor_table):
            try:
                return _unpickler(io.BytesIO(binary_data)).load()
            except AttributeError as error:
                explained = AttributeError(f"{error} {NOT_ON_CALLEE}")
                explained.__cause__ = error
                return explained


def _put_into_table(thing: Any) -> int:
    table: list[Any] = _thread_local_tensor_tables.send_tables
    table.append(thing)
    return len(table) - 1


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """The value as bytes, and its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """The value again."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """What a worker runs for a call that the program's own pickler wrote."""
    udf = deserialize(binary_data, tensor_table)
    if isinstance(udf, AttributeError):
        raise udf
    return udf.func(*udf.args, **udf.kwargs)


setattr(run_pickled, DEFERRED, True)  # what it runs may be a function that returns a future of its answer


@async_execution
def run_pickled_async(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """The same, for a function that must return a future of its answer."""
    return run_pickled(binary_data, tensor_table)


def _run_function(python_udf: Any) -> Any:
    """Run a function; what it raises is returned as a `RemoteException`, and printed."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        text = f"On {_get_current_rpc_agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)  # noqa: T201 - torch's behaviour
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise what `_run_function` returned, if a function raised it."""
    if not isinstance(result, RemoteException):
        return
    text = unescaped(result.msg)
    try:
        made = result.exception_type(text)
    except Exception as failure:
        raise RuntimeError(not_rebuilt(str(failure), text)) from failure
    raise made


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """A record of the profiler that has begun; whoever asked for it ends it."""
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        raise AssertionError("Autograd profiler should be enabled.")
    record = autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    autograd._run_before_callbacks(record, key)
    return record
