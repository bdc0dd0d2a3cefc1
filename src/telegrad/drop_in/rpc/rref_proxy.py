"""torch.distributed.rpc.rref_proxy on telegrad: method calls on the value of an RRef.

`RRef.rpc_sync()`, `RRef.rpc_async()` and `RRef.remote()` return telegrad's own proxies, which need one round trip.
`RRefProxy` is for programs that create one directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.futures import Future

from telegrad.drop_in.rpc import functions
from telegrad.drop_in.rpc.api import remote, rpc_async, rpc_sync
from telegrad.drop_in.rpc.constants import UNSET_RPC_TIMEOUT

__all__ = ["UNSET_RPC_TIMEOUT", "Future", "RRefProxy", "functions", "rpc_async"]


def _local_invoke(rref: Any, func_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a value on this worker."""
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(rref: Any, func_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that returns a future of its result, of a value on this worker."""
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


def _invoke_rpc(
    rref: Any, rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    """Call a method on the owner of the value, through `rpc_api`."""
    for function, proxy in ((rpc_sync, rref.rpc_sync), (rpc_async, rref.rpc_async), (remote, rref.remote)):
        if rpc_api is function:
            return getattr(proxy(timeout), func_name)(*args, **kwargs)
    method = getattr(rref._get_type(timeout), func_name)
    run = _local_invoke_async_execution if hasattr(method, "_wrapped_async_rpc_function") else _local_invoke
    return rpc_api(rref.owner(), run, args=(rref, func_name, args, kwargs), timeout=timeout)


class RRefProxy:
    """A proxy of the value of an RRef. Its methods run on the owner of the value."""

    def __init__(self, rref: Any, rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)
