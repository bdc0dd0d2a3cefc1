"""RRefs under the drop-in: telegrad's, with torch's private names and the error messages that programs match."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.agents import get_current_agent, is_current_agent_set
from telegrad.drop_in.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.drop_in.rpc.futures import Future
from telegrad.drop_in.rpc.torch_errors import NO_AGENT, to_torch_error, worker_text
from telegrad.errors import CallCancelled, CallError, DeadlineExceeded, NotInitialized, ReferenceGone, TelegradError
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkId, RRefId
from telegrad.rref import handle as telegrad_rref
from telegrad.rref.manager import RRefManager

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_MAX_POLLS, _POLL_INTERVAL = 300, 0.01
"""How often, and how many seconds apart, `shutdown` polls for deletions in flight before it reports a leak. This counts
polls rather than time, because deletions may still be unread after this process stalled."""


def _raises_torch_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Convert the errors of a method of an RRef to torch's."""

    @wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        rref: Any = args[0]
        try:
            return method(*args, **kwargs)
        except (NotInitialized, ReferenceGone) as error:
            raise ReferenceGone(
                f"{rref} was released, or the agent was shut down. Cannot call {method.__name__}() on it after "
                f"deletion. ({error})"
            ) from error
        except Exception as error:
            raise to_torch_error(error, rref._manager.agent) from error

    return wrapper


class PyRRef(telegrad_rref.RRef[T]):
    """A reference to a value on its owner."""

    _type: torch.futures.Future[type] | None = None
    _profiling: torch.futures.Future[Any] | None = None

    def __new__(cls, value: Any = None, type_hint: object = None) -> Self:
        if not is_current_agent_set():
            raise RuntimeError(NO_AGENT)
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        return super().__new__(cls, value, type_hint)

    @_raises_torch_errors
    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value: the object itself on its owner, a copy elsewhere."""
        self._check_creation()
        try:
            return super().to_here(timeout)
        except CallError as error:
            # The creation may have failed meanwhile. If this worker is the owner, the cancellation may be known first.
            self._check_creation(error if self._user is None and isinstance(error, CallCancelled) else None)
            raise

    def _check_creation(self, error: CallError | None = None) -> None:
        """Raise an error with torch's message if the call that creates the value failed."""
        error = self._manager.creation_error(self) or error
        if error is not None:
            raise type(error)(_creation_text(error), worker=error.worker, elapsed=error.elapsed) from error

    @_raises_torch_errors
    def local_value(self) -> T:
        """Return the value. Works on its owner only."""
        if self._user is not None:
            agent = self._manager.agent
            raise TelegradError(
                f"For UserRRef(rref_id={_show(self._id)}, fork_id={_show(self._user.fork)}), can't call localValue() "
                f"on user {worker_text(agent, agent.me.name)}. Call it on owner {worker_text(agent, self.owner_name())}"
            )
        self._check_creation()
        return super().local_value()

    def _check(self) -> None:
        super()._check()
        error = self._manager.creation_error(self)
        if error is not None:  # not a CallError: no call has been made
            raise TelegradError(f"{self} cannot be used: {_creation_text(error)}") from error

    def __repr__(self) -> str:
        if self._user is None:
            return f"OwnerRRef({_show(self._id)})"
        return f"UserRRef(RRefId = {_show(self._id)}, ForkId = {_show(self._user.fork)})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: send it as an argument or "
            "the result of a call"
        )

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("Can not unpickle rref in python pickler, rref can only be unpickled when using RPC")

    # -- methods of the value -----------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner and return their results."""
        return telegrad_rref.Proxy(self, timeout, _call_sync)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner and return futures of their results."""
        return telegrad_rref.Proxy(self, timeout, _call_async)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner and return RRefs to their results."""
        return telegrad_rref.Proxy(self, timeout, _call_remote)

    @_raises_torch_errors
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, on its owner."""
        if self._user is not None and dist_autograd_ctx_id == -1:
            raise TelegradError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        super().backward(dist_autograd_ctx_id, retain_graph)

    # -- torch's private names ----------------------------------------------------------------------------------------

    def _get_future(self) -> Any:
        made: Future[Any] = Future(self._manager.agent)

        def done(future: torch.futures.Future[Any]) -> None:
            try:
                made.set_result(future.value())
            except Exception as error:  # noqa: BLE001 - raised in whoever waits for the future
                made.set_exception(to_torch_error(error, self._manager.agent))

        super()._get_future().add_done_callback(done)
        return made

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, which is requested once."""
        future = self._type
        if future is None:
            if self._user is None:
                future = Future(self._manager.agent)
                future.set_result(type(self.local_value()))
            else:
                from telegrad.drop_in.rpc import api

                future = api.rpc_async(self.owner(), _rref_typeof_on_owner, (self,), timeout=timeout)
            self._type = future
            future.add_done_callback(self._forget_failed_type)
        return future.wait() if blocking else future

    def _forget_failed_type(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception:  # noqa: BLE001 - raised in whoever waits for it; the next caller asks again
            self._type = None

    def _serialize(self) -> tuple[Any, ...]:
        """Return a form of this RRef that can be sent in a call. The receiver passes it to `_deserialize`."""
        user = self._user
        if self._manager.agent.closed or self._released or (user is not None and user.refused):
            raise RuntimeError(f"{self} was deleted. Cannot call fork an UserRRef after deletion.")
        self._check()
        return (self,)

    @staticmethod
    def _deserialize(tp: tuple[Any, ...]) -> PyRRef[Any]:
        """Return the RRef that `_serialize` returned, on the worker that received it in a call."""
        if len(tp) != 1 or not isinstance(tp[0], PyRRef):
            raise TypeError(f"_deserialize() takes what _serialize() returned, not {tp!r}")
        return tp[0]

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        """Set the future that `_get_profiling_future` returns."""
        self._profiling = future

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when the value is. Requires a profiler during the call of `remote`."""
        if self._profiling is None:
            raise RuntimeError("Profiling future has not been set! No profiler was active when the RRef was created.")
        return self._profiling


class RRef(PyRRef[T]):
    """A reference to a value on its owner. ``RRef(value)`` refers to a value on this worker."""


def _creation_text(error: CallError) -> str:
    if isinstance(error, DeadlineExceeded):
        return (
            "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not "
            f"exist: {error}"
        )
    return f"RRef creation via rpc.remote() failed: {error}"


def _show(name: ForkId | RRefId) -> str:
    return f"GloballyUniqueId(created_on={name[0]}, local_id={name[1] & ((1 << COUNTER_BITS) - 1)})"


# -- method calls -----------------------------------------------------------------------------------------------------


@_raises_torch_errors
def _call_sync(rref: Any, timeout: float, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return telegrad_rref._call_sync(rref, timeout, name, args, kwargs)


def _call_async(rref: Any, timeout: float, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return telegrad_rref._call_async(rref, timeout, name, args, kwargs, Future)


@_raises_torch_errors
def _call_remote(rref: Any, timeout: float, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(name, str):
        getattr(rref._get_type(timeout), name)  # torch reports a missing method before the call
    return telegrad_rref._call_remote(rref, timeout, name, args, kwargs)


def _rref_typeof_on_owner(rref: Any, blocking: bool = True) -> Any:
    return type(rref.local_value()) if blocking else rref._get_type(blocking=False)


def _rref_typeof_on_user(rref: Any, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    return rref._get_type(timeout, blocking)


# -- the RRefs of the group -------------------------------------------------------------------------------------------


def create(
    agent: Agent, to: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
) -> RRef[Any]:
    """Run a function on a worker, keep the result there, and return an RRef to it."""
    references: RRefManager = agent.references
    made: Any = references.create(to, function, args, kwargs, timeout)
    return made  # type: ignore[no-any-return]  # of the class that `use_torch_rrefs` set


def use_torch_rrefs(agent: Agent) -> None:
    """Make `agent` create and receive RRefs of the drop-in's class."""
    agent.references.handle_class = RRef


def _rref_context_get_debug_info() -> dict[str, str]:
    counts = get_current_agent().agent.references.counts()
    return {
        "num_owner_rrefs": str(counts["shared"]),
        "num_pending_futures": str(counts["unsettled"]),
        "num_pending_users": str(counts["unsettled"]),
        "num_forks": str(counts["forks elsewhere"]),
    }


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 0) -> None:
    """Release all RRefs to values of other workers before the group shuts down."""
    get_current_agent().agent.references.release_all()


def await_deletions(agent: Agent) -> list[str]:
    """Wait for the deletions in flight, and return the RRefs to values of this worker that others still hold."""
    references: RRefManager = agent.references
    for _ in range(_MAX_POLLS):
        if not references.counts()["shared"]:
            break
        agent.executor.wait(agent.runtime.event(), agent.runtime.now() + _POLL_INTERVAL)
    return [line for line in references.held() if "is held by" in line]


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Raise an error if others still held RRefs to values of this worker when it left."""
    leaks = get_current_agent().leaks
    if leaks and not ignore_leak:
        raise RuntimeError(f"Leaking RRef: {'; '.join(leaks)}")


keep_uncompiled(__name__)
