"""Calls, gatherings and shutdown under the names, signatures and texts of torch.distributed.rpc.api.

Programs and PyTorch's tests replace some of the private functions here, so the others find them by name in this module.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.agents import get_current_agent as _get_current_rpc_agent
from telegrad.drop_in.rpc.agents import is_current_agent_set as _is_current_rpc_agent_set
from telegrad.drop_in.rpc.agents import reset_current_agent as _reset_current_rpc_agent
from telegrad.drop_in.rpc.agents import set_current_agent as _set_and_start_rpc_agent
from telegrad.drop_in.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.drop_in.rpc.futures import Future, failed
from telegrad.drop_in.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler
from telegrad.drop_in.rpc.membership import leave_open_group
from telegrad.drop_in.rpc.prepared import PreparedCall
from telegrad.drop_in.rpc.profiling import RemoteProfilerManager
from telegrad.drop_in.rpc.references import (
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
from telegrad.drop_in.rpc.texts import NOT_INITIALIZED, as_torch
from telegrad.errors import CallError, PayloadError
from telegrad.rpc.signals import deliver_kept, keeping
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
"""Whether a shutdown says nothing of references that are still held. Programs set it."""
_default_pickler: Any = _internal_rpc_pickler
_LONG = 10.0  # seconds that a worker may take to say that it is there
_PATIENCE = 1.0  # seconds after which those that have not come to a gathering are looked after


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Have the calls made in a block pickled by `rpc_pickler`."""
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


def _get_should_profile() -> bool:
    """Whether a profiler watches this thread, which then sees what the caller does of a call."""
    return bool(_profiler_enabled())


def _enable_rpc_profiler(
    should_profile: bool, qualified_name: str | None, func: Any, rpc_type: RPCExecMode, dst_worker_info: WorkerInfo
) -> Any:
    """An event in the profiler for a block that makes a call; `qualified_name` is that of an operator of torch."""
    if not should_profile:
        return contextlib.nullcontext()
    name = qualified_name or getattr(func, "qualified_name", "") or getattr(func, "__qualname__", repr(func))
    key = _build_rpc_profiling_key(rpc_type, str(name), get_worker_info().name, dst_worker_info.name)
    return torch.autograd.profiler.record_function(key)


def _profiled(mode: RPCExecMode, func: Any, to: int) -> Any:
    """An event in the profiler, if one is on, for what the caller does of a call."""
    if not _profiler_enabled():
        return contextlib.nullcontext()
    builtin = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    return _enable_rpc_profiler(True, builtin, func, mode, get_worker_info(to))


@_require_initialized
def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Run `func` on worker `to` and return its result."""
    call = PreparedCall(_get_current_rpc_agent().agent, to, func, args, kwargs, timeout, _default_pickler)
    try:
        with _profiled(RPCExecMode.SYNC, func, call.to):
            return call.agent.call(call.to, call.function, call.args, call.kwargs, timeout=call.timeout)
    except Exception as error:
        raise as_torch(error, call.agent, builtin=call.builtin) from error


@_require_initialized
def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> torch.futures.Future[Any]:
    """Start `func` on worker `to`, and return a future of its result."""
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    if keeping:
        deliver_kept()
    return future


def _invoke_rpc(
    to: Any,
    func: Any,
    rpc_type: RPCExecMode,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Start a call, which the profiler shows as one of that type."""
    call = PreparedCall(_get_current_rpc_agent().agent, to, func, args, kwargs, rpc_timeout, _default_pickler)
    future: Future[Any] = Future(call.agent)
    future.builtin = call.builtin
    try:
        with _profiled(rpc_type, func, call.to):
            future.start(call.to, call.function, call.args, call.kwargs, call.timeout)
    except CallError as error:  # a worker that is gone, or no time left: torch's callers hear it from the future
        future = failed(as_torch(error, call.agent))
    except PayloadError as error:
        raise as_torch(error, call.agent) from error
    return future


@_require_initialized
def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """Have worker `to` run `func` and keep the result; a reference to it, at once."""
    call = PreparedCall(_get_current_rpc_agent().agent, to, func, args, kwargs, timeout, _default_pickler)
    try:
        with _profiled(RPCExecMode.REMOTE, func, call.to) as event:
            made = create(call.agent, call.to, call.function, call.args, call.kwargs, call.timeout)
    except PayloadError as error:
        raise as_torch(error, call.agent) from error
    if event is not None:
        made._set_profiling_future(made._get_future())
    if keeping:
        deliver_kept()
    return made


_thread_local_var = threading.local()


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of a block, for all futures that `rpc_async` returned in it."""
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
    """The worker of that name; this one, if none is given."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    timeout: float = _get_current_rpc_agent().agent.settings.rpc_timeout
    return timeout


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:  # noqa: N803 - torch's name
    _get_current_rpc_agent().set_timeout(rpcTimeoutSeconds)


class AllGatherStates:
    """One gathering: what has come, and the signal that all has."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()  # protects the two below
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """A member brings its value to the leader, on which this runs."""
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
    """The leader brings everybody's values to a member, on which this runs."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Bring a value, and get the values of all `worker_names` (default: everybody), which must all call this.

    The member whose name comes first leads: the others call it with their values, and it calls them with all.
    """
    members = set(worker_names or _ALL_WORKER_NAMES)
    leader = min(members)
    mine = get_worker_info().name
    with _all_gather_dict_lock:
        everybody = "".join(sorted(members))
        number = _all_gather_sequence_id.get(everybody, 0)
        _all_gather_sequence_id[everybody] = number + 1
        sequence_id = f"{everybody}{number}"
        states = _all_gather_sequence_id_to_states[sequence_id]  # from now on `_is_gathering`
    call_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    signal_timeout = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    try:
        if mine == leader:
            _gather_to_leader(sequence_id, mine, obj, members)
        else:
            rpc_sync(leader, _gather_to_leader, (sequence_id, mine, obj, members), timeout=call_timeout)
        _wait_for(states, members, number, call_timeout, signal_timeout)
        if mine == leader:
            _tell_followers(sequence_id, members - {leader}, states.gathered_objects, call_timeout)
        return states.gathered_objects
    finally:
        with _all_gather_dict_lock:
            _all_gather_sequence_id_to_states.pop(sequence_id, None)


def _wait_for(
    states: AllGatherStates, members: set[str], number: int, call_timeout: float, timeout: float | None
) -> None:
    """Wait for the signal. Torch waits for ever if a member dies; here each second somebody is asked.

    The leader calls those that have not come, so that a dead one is found; a follower asks the leader whether it still
    waits, or has given up.
    """
    agent, mine, leader = _get_current_rpc_agent().agent, get_worker_info().name, min(members)
    everybody = "".join(sorted(members))
    deadline = None if timeout is None else agent.runtime.now() + timeout
    while not states.proceed_signal.is_set():
        left = _PATIENCE if deadline is None else min(_PATIENCE, deadline - agent.runtime.now())
        agent.executor.block()
        try:
            if states.proceed_signal.wait(max(0.0, left)):
                return
        finally:
            agent.executor.unblock()
        if deadline is not None and agent.runtime.now() >= deadline:
            raise RuntimeError(f"timed out in _all_gather after {timeout:.2f} seconds: not all members came")
        absent = sorted(members - set(states.gathered_objects)) if mine == leader else [leader]
        for name in absent:
            here = rpc_sync(name, _is_gathering, (everybody, number), timeout=max(call_timeout, _LONG))
            if not here and not states.proceed_signal.is_set():
                raise RuntimeError(
                    f"Followers {absent} timed out in _all_gather after {call_timeout:.2f} seconds"
                    if mine == leader
                    else f"worker {leader!r}, which leads the _all_gather, has given it up{_because(agent)}"
                )


def _because(agent: Any) -> str:
    cause = agent.shutdown_protocol.first_cause
    return f": {cause}" if cause else ""


def _is_gathering(everybody: str, number: int) -> bool:
    """Whether this worker has yet to come to the gathering, or is still at it."""
    with _all_gather_dict_lock:
        begun = number < _all_gather_sequence_id.get(everybody, 0)
        return not begun or f"{everybody}{number}" in _all_gather_sequence_id_to_states


def _tell_followers(sequence_id: str, followers: set[str], objects: dict[str, Any], timeout: float) -> None:
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


# -- the end --------------------------------------------------------------------------------------------------


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. A graceful shutdown waits until all workers have called it and no call is under way."""
    if not graceful or _get_current_rpc_agent().agent.closed:  # closed at exit: a thread waited in a call
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
            leave_open_group(agent.store, agent.agent, timeout or get_rpc_timeout() or _LONG)
        agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _get_current_rpc_agent().shutdown()
        _reset_current_rpc_agent()


# Torch's module has these, too, and they call what is above.
from telegrad.drop_in.rpc._utils import _group_membership_management, _update_group_membership  # noqa: E402
from telegrad.drop_in.rpc.invoking import (  # noqa: E402
    _cleanup_python_rpc_handler,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
)

keep_uncompiled(__name__)
