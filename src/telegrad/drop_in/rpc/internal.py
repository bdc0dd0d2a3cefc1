"""What torch.distributed.rpc.internal offers to programs: its pickler, its names for ways to call, its profiling keys.

Telegrad encodes calls itself. The pickler here is for programs that pickle by themselves or bring one of their own:
``rpc.api._use_rpc_pickler(pickler)`` has every call that follows pickled by it.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.agent.serving import DEFERRED
from telegrad.drop_in.rpc.texts import NOT_ON_CALLEE
from telegrad.wire.torchscript import reducer_for

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


class _Tables(threading.local):
    """The tensors of the values that this thread is pickling or reading, innermost last."""

    def __init__(self) -> None:
        self.sent: list[list[torch.Tensor]] = []
        self.received: list[Sequence[torch.Tensor]] = []


_tables = _Tables()


class _InternalRPCPickler:
    """Writes a value as bytes and a list of tensors, and reads it back. Programs derive theirs from it."""

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[[Any], Any]] = dict(copyreg.dispatch_table)
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        table = _tables.sent[-1]
        table.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(table) - 1,)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        return _tables.received[-1][tensor_index]

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        # A reference travels beside the bytes, like a tensor: its owner must hear of it.
        py_rref._check_fork()
        return self._tensor_reducer(py_rref)

    def _rref_reducer(self, rref: Any) -> tuple[Any, ...]:
        return self._py_rref_reducer(rref)

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """The value as bytes, and its tensors."""
        from telegrad.drop_in.rpc.references import PyRRef, RRef

        file = io.BytesIO()
        pickler: Any = pickle.Pickler(file)
        pickler.dispatch_table = {
            **self._dispatch_table,
            PyRRef: self._py_rref_reducer,
            RRef: self._rref_reducer,
            **self._class_reducer_dict,
        }
        script = reducer_for(type(obj))
        if script is not None:
            pickler.dispatch_table[type(obj)] = script
        _tables.sent.append([])
        try:
            pickler.dump(obj)
            return file.getvalue(), _tables.sent[-1]
        finally:
            _tables.sent.pop()

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """The value again. A name that cannot be found comes back as an AttributeError, as in torch."""
        _tables.received.append(tensor_table)
        try:
            return pickle.loads(binary_data)
        except AttributeError as error:
            explained = AttributeError(f"{error} {NOT_ON_CALLEE}")
            explained.__cause__ = error
            return explained
        finally:
            _tables.received.pop()


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
