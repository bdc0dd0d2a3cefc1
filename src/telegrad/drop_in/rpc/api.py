"""Calls, `_all_gather` and shutdown with the names, signatures and error messages of torch.distributed.rpc.api.

Programs and PyTorch's tests monkeypatch some private functions of this module, so the others look them up here by name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc import all_gather
from telegrad.drop_in.rpc._utils import _group_membership_management, _update_group_membership
from telegrad.drop_in.rpc.agents import get_current_agent as _get_current_rpc_agent
from telegrad.drop_in.rpc.agents import is_current_agent_set as _is_current_rpc_agent_set
from telegrad.drop_in.rpc.agents import reset_current_agent as _reset_current_rpc_agent
from telegrad.drop_in.rpc.agents import set_current_agent as _set_and_start_rpc_agent
from telegrad.drop_in.rpc.all_gather import (
    AllGatherStates,
    _all_gather_dict_lock,
    _all_gather_sequence_id,
    _all_gather_sequence_id_to_states,
)
from telegrad.drop_in.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.drop_in.rpc.futures import Future, failed
from telegrad.drop_in.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler
from telegrad.drop_in.rpc.profiling import (
    RemoteProfilerManager,
    _enable_rpc_profiler,
    _get_should_profile,
    _profiling_future,
    _record_call,
)
from telegrad.drop_in.rpc.rref import (
    PyRRef,
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _rref_context_get_debug_info,
    _rref_typeof_on_owner,
    _rref_typeof_on_user,
    await_deletions,
    create,
)
from telegrad.drop_in.rpc.torch_call import TorchCall
from telegrad.drop_in.rpc.torch_errors import NOT_INITIALIZED, to_torch_error
from telegrad.errors import CallError, PayloadError
from telegrad.rpc.signals import deliver_pending, pending_handlers
from telegrad.worker_info import WorkerInfo

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

_ignore_rref_leak = True
"""Whether `shutdown` ignores RRefs that are still held. Programs set it."""
_default_pickler: Any = _internal_rpc_pickler


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle the calls made inside the block with `rpc_pickler`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return wrapper


# -- calls ----------------------------------------------------------------------------------------------------


@_require_initialized
def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Run `func` on worker `to` and return its result."""
    call = TorchCall(_get_current_rpc_agent().agent, to, func, args, kwargs, timeout, _default_pickler)
    try:
        with _record_call(RPCExecMode.SYNC, func, call.to):
            return call.agent.call(call.to, call.function, call.args, call.kwargs, timeout=call.timeout)
    except Exception as error:
        raise to_torch_error(error, call.agent, builtin=call.builtin) from error


@_require_initialized
def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> torch.futures.Future[Any]:
    """Start `func` on worker `to` and return a future of its result."""
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    if pending_handlers:
        deliver_pending()
    return future


def _invoke_rpc(
    to: Any,
    func: Any,
    rpc_type: RPCExecMode,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Start a call. The profiler shows it as one of type `rpc_type`."""
    call = TorchCall(_get_current_rpc_agent().agent, to, func, args, kwargs, rpc_timeout, _default_pickler)
    future: Future[Any] = Future(call.agent)
    future.builtin = call.builtin
    try:
        with _record_call(rpc_type, func, call.to):
            future.start(call.to, call.function, call.args, call.kwargs, call.timeout)
    except CallError as error:  # a lost worker or an expired timeout: torch reports both through the future
        future = failed(to_torch_error(error, call.agent))
    except PayloadError as error:
        raise to_torch_error(error, call.agent) from error
    return future


@_require_initialized
def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """Run `func` on worker `to`, keep the result there, and return an RRef to it without waiting."""
    call = TorchCall(_get_current_rpc_agent().agent, to, func, args, kwargs, timeout, _default_pickler)
    try:
        with _record_call(RPCExecMode.REMOTE, func, call.to) as name:
            made = create(call.agent, call.to, call.function, call.args, call.kwargs, call.timeout)
    except PayloadError as error:
        raise to_torch_error(error, call.agent) from error
    if name is not None:
        made._set_profiling_future(_profiling_future(call.agent, name, made))
    if pending_handlers:
        deliver_pending()
    return made


_thread_local_var = threading.local()


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for all futures that `rpc_async` returned inside it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# -- the group ------------------------------------------------------------------------------------------------


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return the worker with that name, or this one if no name is given."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def get_rpc_timeout() -> float:
    """Return the default timeout of calls, in seconds."""
    timeout: float = _get_current_rpc_agent().agent.settings.rpc_timeout
    return timeout


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:  # noqa: N803 - torch's name
    _get_current_rpc_agent().set_timeout(rpcTimeoutSeconds)


_ALL_WORKER_NAMES: set[str] = set()


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Store the value of a follower. Runs on the leader, called by the follower."""
    with _all_gather_dict_lock:
        expected = worker_names or _ALL_WORKER_NAMES
        if worker_name not in expected:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if set(expected) == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Store the values of all members. Runs on a follower, called by the leader."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Return the values that all `worker_names` (default: everybody) passed. All of them must call this.

    The member whose name sorts first is the leader: the others send it their values, and it sends all values back.
    """
    members = set(worker_names or _ALL_WORKER_NAMES)
    leader = min(members)
    mine = get_worker_info().name
    number, sequence_id, states = all_gather.begin(members)
    call_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    signal_timeout = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    try:
        if mine == leader:
            _gather_to_leader(sequence_id, mine, obj, members)
        else:
            rpc_sync(leader, _gather_to_leader, (sequence_id, mine, obj, members), timeout=call_timeout)
        agent = _get_current_rpc_agent().agent
        all_gather.wait_for_members(agent, states, members, number, call_timeout, signal_timeout)
        if mine == leader:
            _broadcast(sequence_id, members - {leader}, states.gathered_objects, call_timeout)
        return states.gathered_objects
    finally:
        all_gather.end(sequence_id)


def _broadcast(sequence_id: str, followers: set[str], objects: dict[str, Any], timeout: float) -> None:
    """Send the values of all members to each follower."""
    futures = {
        name: rpc_async(name, _broadcast_to_followers, (sequence_id, objects), timeout=timeout) for name in followers
    }
    errors: list[tuple[str, Exception]] = []
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {timeout:.2f} seconds. The first "
            f"exception is {errors[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: Sequence[str]) -> None:
    """Wait until all `worker_names` have called this. Failures are logged, as in torch."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# -- shutdown -------------------------------------------------------------------------------------------------


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. A graceful shutdown waits until all workers have called it and no call is in progress."""
    if (
        not graceful or _get_current_rpc_agent().agent.closed
    ):  # closed at interpreter exit, where a thread was waiting in a call
        _finalize_shutdown()
        return
    try:
        agent = _get_current_rpc_agent()
        if agent.is_static_group:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            if not _ignore_rref_leak:
                agent.sync()
                agent.leaks = await_deletions(agent.agent)
        else:
            agent.agent.shutdown_protocol.on_leave(False)  # nobody who joins from now on calls this worker
        agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _get_current_rpc_agent().shutdown()
        _reset_current_rpc_agent()


# At the end, because they call the functions above. Torch's module has these names too.
from telegrad.drop_in.rpc.native_calls import (  # noqa: E402
    _cleanup_python_rpc_handler,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
)

keep_uncompiled(__name__)
