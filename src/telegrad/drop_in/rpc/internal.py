"""torch.distributed.rpc.internal on telegrad: its pickler, its names for kinds of calls, its profiling keys.

Telegrad encodes calls itself. This pickler is for programs that call it directly or derive their own from it. With
``rpc.api._use_rpc_pickler(pickler)``, calls are pickled by `pickler`.
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
from telegrad.drop_in.rpc.torch_errors import NOT_ON_CALLEE, not_rebuilt, unescaped
from telegrad.wire.torchscript import load_script_module, reducer_for

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function was called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """The reply of torch's own workers when a function raised."""

    msg: str
    exception_type: type[BaseException]


_pickler: type[pickle.Pickler] = pickle.Pickler
_unpickler: type[pickle.Unpickler] = pickle.Unpickler
"""Programs replace these."""

_thread_local_tensor_tables = threading.local()
"""``send_tables`` and ``recv_tables``: lists of the tensors of the value that this thread is pickling or unpickling."""


@contextmanager
def _table(name: str, tensors: Sequence[Any]) -> Iterator[None]:
    """Use `tensors` as the table of that name inside the block, then restore the table of the enclosing value."""
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
    """Converts a value to bytes and a list of tensors, and back. Programs derive their own from it."""

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[[Any], Any]] = dict(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return _InternalRPCPickler._tensor_receiver, (_add_to_table(tensor),)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        received: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return received

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        # An RRef is sent beside the bytes, like a tensor, because its owner must learn of the fork.
        return _InternalRPCPickler._py_rref_receiver, (_add_to_table(py_rref._serialize()),)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: Any) -> Any:
        """Return the RRef, given its index in the table or the result of `RRef._serialize`."""
        from telegrad.drop_in.rpc.rref import PyRRef

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
        """Return the value as bytes, and its tensors."""
        from telegrad.drop_in.rpc.rref import PyRRef, RRef

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
        """Return the value, or, as in torch, an AttributeError if a name cannot be found."""
        with _table("recv_tables", tensor_table):
            try:
                return _unpickler(io.BytesIO(binary_data)).load()
            except AttributeError as error:
                explained = AttributeError(f"{error} {NOT_ON_CALLEE}")
                explained.__cause__ = error
                return explained


def _add_to_table(thing: Any) -> int:
    table: list[Any] = _thread_local_tensor_tables.send_tables
    table.append(thing)
    return len(table) - 1


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the value as bytes, and its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Return the value."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Run a call that the program's own pickler wrote."""
    udf = deserialize(binary_data, tensor_table)
    if isinstance(udf, AttributeError):
        raise udf
    return udf.func(*udf.args, **udf.kwargs)


setattr(run_pickled, DEFERRED, True)  # the function may return a future of its result


@async_execution
def run_pickled_async(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Run a call of a function that must return a future of its result."""
    return run_pickled(binary_data, tensor_table)


def _run_function(python_udf: Any) -> Any:
    """Run a function. Print an exception that it raises, and return it as a `RemoteException`."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:  # noqa: BLE001 - returned to the caller
        text = f"On {_get_current_rpc_agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)  # noqa: T201 - torch's behaviour
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise the exception in `result`, if `_run_function` returned one."""
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
    """Return a started profiler record, which the caller must end."""
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        raise AssertionError("Autograd profiler should be enabled.")
    record = autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    autograd._run_before_callbacks(record, key)
    return record
