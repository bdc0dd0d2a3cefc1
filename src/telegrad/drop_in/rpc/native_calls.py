"""Calls in the form that torch's C++ takes: an operator by name, a pickled function, a TorchScript function by name.

Only programs that bypass `rpc_sync`, `rpc_async` and `remote` use these. Telegrad's own calls do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.drop_in.rpc import api
from telegrad.drop_in.rpc.functions import async_execution
from telegrad.drop_in.rpc.internal import run_pickled, run_pickled_async
from telegrad.wire.torchscript import find_script

Dst = Any
"""A WorkerInfo or the name of a worker."""

_rpc_async: Callable[..., Any] = api.rpc_async  # type: ignore[has-type]  # api imports this module at its end
_remote: Callable[..., Any] = api.remote  # type: ignore[has-type]


def _run_operator(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch operator, with a name like ``aten::add``."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)


def _run_script(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a TorchScript function, with a name like ``__torch__.module.function``."""
    return find_script(name.removeprefix("__torch__."))(*args, **kwargs)


_run_script_async = async_execution(_run_script)


def _operator_caller(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a torch operator on a worker, through `rpc_async` or `remote`."""

    def invoke(dst: Dst, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any) -> Any:  # noqa: N803 - torch's names
        return start(dst, _run_operator, (opName, args, kwargs), timeout=rpcTimeoutSeconds)

    return invoke


def _udf_caller(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a function which a pickler of `torch.distributed.rpc.internal` wrote."""

    def invoke(
        dst: Dst,
        pickledPythonUDF: bytes,  # noqa: N803 - torch's names
        tensors: Sequence[torch.Tensor],
        rpcTimeoutSeconds: float,  # noqa: N803
        isAsyncExecution: bool,  # noqa: N803
    ) -> Any:
        run = run_pickled_async if isAsyncExecution else run_pickled
        return start(dst, run, (pickledPythonUDF, tensors), timeout=rpcTimeoutSeconds)

    return invoke


_invoke_rpc_builtin = _operator_caller(_rpc_async)
_invoke_remote_builtin = _operator_caller(_remote)
_invoke_rpc_python_udf = _udf_caller(_rpc_async)
_invoke_remote_python_udf = _udf_caller(_remote)


def _invoke_rpc_torchscript(
    dstWorkerName: Dst,  # noqa: N803 - torch's names
    qualifiedNameStr: str,  # noqa: N803
    argsTuple: Sequence[Any],  # noqa: N803
    kwargsDict: dict[str, Any],  # noqa: N803
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
) -> Any:
    """Start a TorchScript function on a worker and return a future of its result."""
    run = _run_script_async if isAsyncExecution else _run_script
    call = (qualifiedNameStr, tuple(argsTuple), kwargsDict)
    return _rpc_async(dstWorkerName, run, call, timeout=rpcTimeoutSeconds)


def _invoke_remote_torchscript(
    dstWorkerName: Dst,  # noqa: N803 - torch's names
    qualifiedNameStr: str,  # noqa: N803
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a TorchScript function on a worker and return an RRef to its result."""
    run = _run_script_async if isAsyncExecution else _run_script
    return _remote(dstWorkerName, run, (qualifiedNameStr, args, kwargs), timeout=rpcTimeoutSeconds)


def _enable_jit_rref_pickle() -> None:
    """Raise an error: TorchScript cannot hold telegrad's RRefs."""
    raise RuntimeError(
        "TorchScript cannot hold telegrad's RRefs, so torch.jit.save cannot write them. Keep the RRef next to the "
        "module, and send both in a call"
    )


def _disable_jit_rref_pickle() -> None:
    """Do nothing: it is never enabled."""


def _cleanup_python_rpc_handler() -> None:
    """Do nothing: telegrad has no C++ object that keeps Python functions alive."""
