"""Calls as torch's C++ takes them: by the name of an operator, by pickled bytes, by the name of a TorchScript function.

Programs that go around `rpc_sync` and the like call these. Telegrad's own calls do not go through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from telegrad.drop_in.rpc import api
from telegrad.drop_in.rpc.functions import async_execution
from telegrad.drop_in.rpc.internal import run_pickled, run_pickled_async
from telegrad.wire.torchscript import find_script

Dst = Any
"""A WorkerInfo or the name of a worker."""


def _run_operator(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch, whose name is like ``aten::add``."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)


def _run_script(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a TorchScript function, whose name is like ``__torch__.module.function``."""
    return find_script(name.removeprefix("__torch__."))(*args, **kwargs)


_run_script_async = async_execution(_run_script)


def _invoke_rpc_builtin(dst: Dst, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any) -> Any:  # noqa: N803 - torch's names
    """Start an operator on a worker; a future of its result."""
    return api.rpc_async(dst, _run_operator, (opName, args, kwargs), timeout=rpcTimeoutSeconds)


def _invoke_rpc_python_udf(
    dst: Dst,
    pickledPythonUDF: bytes,  # noqa: N803 - torch's names
    tensors: Sequence[torch.Tensor],
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
) -> Any:
    """Start a function that a pickler of `torch.distributed.rpc.internal` wrote; a future of its result."""
    run = run_pickled_async if isAsyncExecution else run_pickled
    return api.rpc_async(dst, run, (pickledPythonUDF, tensors), timeout=rpcTimeoutSeconds)


def _invoke_rpc_torchscript(
    dstWorkerName: Dst,  # noqa: N803 - torch's names
    qualifiedNameStr: str,  # noqa: N803
    argsTuple: Sequence[Any],  # noqa: N803
    kwargsDict: dict[str, Any],  # noqa: N803
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
) -> Any:
    """Start a TorchScript function on a worker; a future of its result."""
    run = _run_script_async if isAsyncExecution else _run_script
    return api.rpc_async(
        dstWorkerName, run, (qualifiedNameStr, tuple(argsTuple), kwargsDict), timeout=rpcTimeoutSeconds
    )


def _invoke_remote_builtin(dst: Dst, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any) -> Any:  # noqa: N803 - torch's names
    """Run an operator on a worker, which keeps the result; a reference to it."""
    return api.remote(dst, _run_operator, (opName, args, kwargs), timeout=rpcTimeoutSeconds)


def _invoke_remote_python_udf(
    dst: Dst,
    pickledPythonUDF: bytes,  # noqa: N803 - torch's names
    tensors: Sequence[torch.Tensor],
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
) -> Any:
    """Run a function that a pickler of `torch.distributed.rpc.internal` wrote; a reference to its result."""
    run = run_pickled_async if isAsyncExecution else run_pickled
    return api.remote(dst, run, (pickledPythonUDF, tensors), timeout=rpcTimeoutSeconds)


def _invoke_remote_torchscript(
    dstWorkerName: Dst,  # noqa: N803 - torch's names
    qualifiedNameStr: str,  # noqa: N803
    rpcTimeoutSeconds: float,  # noqa: N803
    isAsyncExecution: bool,  # noqa: N803
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a TorchScript function on a worker; a reference to its result."""
    run = _run_script_async if isAsyncExecution else _run_script
    return api.remote(dstWorkerName, run, (qualifiedNameStr, args, kwargs), timeout=rpcTimeoutSeconds)


def _enable_jit_rref_pickle() -> None:
    """Refused: see the error."""
    raise RuntimeError(
        "TorchScript cannot hold references of telegrad, so torch.jit.save cannot write them. Keep the RRef beside the "
        "module, and send both in a call"
    )


def _disable_jit_rref_pickle() -> None:
    """Nothing needs to be done: it is never enabled."""


def _cleanup_python_rpc_handler() -> None:
    """Nothing needs to be done: telegrad has no C++ object that keeps Python functions alive."""
