"""`RRef`, a handle of a value that one worker owns and any worker can reference, and its proxies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import Call
from telegrad.calls.service_names import FETCH, METHOD
from telegrad.calls.tracebacks import hide_frames
from telegrad.default_agent import default_agent
from telegrad.errors import CallError, DeadlineExceeded, ReferenceGone, TelegradError, WorkerLost
from telegrad.futures import Future
from telegrad.options import UNSET_RPC_TIMEOUT, given_timeout
from telegrad.protocol.rref_ids import COUNTER_BITS, RRefId
from telegrad.rref.confirmation import creation_future, wait_until_settled
from telegrad.rref.ids import describe
from telegrad.rref.not_a_value import NotAValue
from telegrad.rref.user_state import UserRRef
from telegrad.wire.messages import Failure, RRefAccess, RRefBackwardReq, StreamPosition
from telegrad.worker_info import WorkerInfo

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager

T = TypeVar("T")


class RRef(NotAValue, Generic[T]):
    """A reference to a value: ``RRef(value)`` owns it on this worker, `remote` creates one on another.

    References can be sent to any worker in the arguments and results of calls. The owner keeps the value while any
    RRef to it exists anywhere. `release`, the end of a ``with`` block, or garbage collection drops a reference.
    """

    __slots__ = ("__weakref__", "_id", "_manager", "_ordered", "_owner", "_released", "_user")

    _manager: RRefManager
    _id: RRefId
    _user: UserRRef | None
    """None on the owner."""
    _owner: int
    _ordered: bool
    _released: bool

    def __new__(cls, value: Any = None, type_hint: object = None, *, ordered: bool = False) -> Self:
        return default_agent().references.own(value, ordered=ordered, cls=cls)  # type: ignore[return-value]  # it makes a `cls`

    @classmethod
    def _make(cls, manager: RRefManager, rref: RRefId, user: UserRRef | None, owner: int, ordered: bool) -> Self:
        made = object.__new__(cls)
        made._manager, made._id, made._user, made._owner, made._ordered = manager, rref, user, owner, ordered
        made._released = False
        return made

    # -- owner ------------------------------------------------------------------------------------------------------

    def is_owner(self) -> bool:
        """Return whether this worker owns the value."""
        return self._user is None

    def owner(self) -> WorkerInfo:
        """Return the worker that owns the value."""
        return WorkerInfo(self.owner_name(), self._owner)

    def owner_name(self) -> str:
        """Return the name of the worker that owns the value."""
        return self._manager.context.name_of(self._owner)

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed this reference."""
        return self._user is None or self._user.confirmed

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        return f"RRef({self._id[0]}:{self._id[1] & ((1 << COUNTER_BITS) - 1)} on worker {self.owner_name()!r}{state})"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error for an attribute of the value, which is not one of the reference."""
        if name.startswith("_"):  # also a field that is not set yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        here = "to_here() is a copy of it" if self._user is not None else "local_value() is the value itself"
        raise AttributeError(
            f"{self!r} is a reference, which has no {name!r}: rref.rpc_sync().{name}(...) calls its method "
            f"on the owner, and rref.{here}",
            name=name,
            obj=self,
        )

    # -- value ------------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value itself on its owner, or a copy elsewhere. In a context, gradients flow through the copy.

        Waits until the value is computed. If its function raised, every call of `to_here` raises that exception.
        """
        if self._user is None:
            return self._local(timeout)
        try:
            self._ensure_usable(timeout)
            access = RRefAccess(self._id, "")
            call = self._manager.agent.client.begin(
                self._owner, FETCH, (), None, given_timeout(timeout), rref_access=access
            )
            return self._complete(call, "to_here")  # type: ignore[no-any-return]
        except (Exception, KeyboardInterrupt) as error:
            hide_frames(error)
            raise

    def local_value(self) -> T:
        """Return the value on its owner, and wait until it is computed."""
        if self._user is not None:
            raise TelegradError(
                f"{self!r}: can't call localValue() on a user: worker {self._manager.agent.me.name!r} is not its "
                "owner. Use to_here() for a copy, or rpc_sync() to call a method on the owner"
            )
        return self._local(UNSET_RPC_TIMEOUT)

    def _local(self, timeout: float) -> T:
        self._check()
        return self._manager.value(self._id, self._manager.deadline(timeout))  # type: ignore[no-any-return]

    def _check(self) -> None:
        """Raise an error if the agent is closed or this handle was released."""
        self._manager.check_open()
        if self._released:
            raise self.released_error()

    def released_error(self) -> ReferenceGone:
        """Return the error for access to a released handle."""
        return ReferenceGone(f"{self!r} was released and can no longer be used")

    def _ensure_usable(self, timeout: float) -> None:
        """Wait until the owner has confirmed this reference, and raise if it never will. Its creator need not wait."""
        user, manager = self._user, self._manager
        assert user is not None
        if self._released or manager.closed or manager.agent.closed:
            self._check()
        if not user.settled and not user.creator:
            wait_until_settled(self, user, timeout)
            self._check()
        if user.owner_lost or user.refused or user.error is not None:
            self._check_user(user)

    def _check_user(self, user: UserRRef) -> None:
        """Raise an error if the owner cannot provide the value."""
        if user.owner_lost:
            name = self.owner_name()
            text = f"{describe(self._id)} is gone: worker {name!r}, its owner, is lost; create the value again"
            raise WorkerLost(text, worker=name)
        if user.refused:
            raise ReferenceGone(
                f"{self!r} no longer exists: the worker that sent it was lost before its owner confirmed it"
            )
        if user.error is not None:
            raise _with_text(user.error, f"{self!r} has no value: {user.error}") from user.error

    def _complete(self, call: Call, what: Method) -> Any:
        """Wait for a call and return its result."""
        client = self._manager.agent.client
        try:
            client.wait(call)
        except BaseException:
            client.cancel(call, "the caller was interrupted")
            raise
        if call.error is not None and isinstance(call.error, WorkerLost | DeadlineExceeded):
            raise _renamed(call.error, f"{method_name(what)}() of {self!r}: {call.error}")
        user = self._user
        if user is not None and user.error is not None and isinstance(call.answer, Failure):
            self._check_user(user)  # the call that creates the value has failed, which says more
        return client.result(call)

    # -- methods of the value ---------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Call methods of the value on its owner: ``rref.rpc_sync().method(*args)`` returns the result."""
        return Proxy(self, timeout, _call_sync)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Call methods of the value on its owner, and return a future of the result."""
        return Proxy(self, timeout, _call_async)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Call methods of the value on its owner, and return a reference to the result, which stays there."""
        return Proxy(self, timeout, _call_remote)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value on its owner: a distributed one in that context, or a local one for -1."""
        if self._user is None:
            self._check()
            self._manager.service.run_backward(self._owner, self._id, dist_autograd_ctx_id, retain_graph)
            return
        self._ensure_usable(0)
        context = self._manager.agent.autograd.contexts.get(dist_autograd_ctx_id)
        if context is not None:
            context.stepped.clear()  # a pass that starts on another worker has no optimizer steps: see telegrad.optim
        call = self._manager.agent.client.ask(
            self._owner,
            f"backward of {self!r}",
            lambda number: RRefBackwardReq(number, self._id, int(dist_autograd_ctx_id), retain_graph),
            0,
        )
        self._complete(call, "backward")

    # -- release ----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop this reference now. Other references to the same value are not affected."""
        if not self._released:
            self._released = True
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Runs in any thread, at any moment: see telegrad.rref.finalizer.
        if not getattr(self, "_released", True):
            self._drop()

    def _drop(self) -> None:
        self._manager.drop(self._id, self._user.fork if self._user is not None else None, self._owner, self._ordered)

    # -- PyTorch's private names --------------------------------------------------------------------------------------

    def _get_future(self) -> Future[Any]:
        """Return a future of the call that computes the value. Its result is None."""
        return creation_future(self)


Method = str | Callable[..., Any]
"""The name of a method of the value, or a function that takes the value as its first argument."""

MethodCaller = Callable[[RRef[Any], float, Method, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a method: `_call_sync`, `_call_async` or `_call_remote`."""


class Proxy:
    """Stands in for the value of a reference: method calls run on its owner, in one round trip."""

    # Has an empty __dict__: otherwise code that reads any object's __dict__ would get a method of the value.
    __slots__ = ("__dict__", "_method_caller", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], timeout: float, method_caller: MethodCaller) -> None:
        self._rref = rref
        self._timeout = timeout
        self._method_caller = method_caller

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._method_caller(self._rref, self._timeout, name, args, kwargs)
            except (Exception, KeyboardInterrupt) as error:
                hide_frames(error)
                raise

        method.__name__ = name
        return method


def call_through(proxy: Proxy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(value, *args, **kwargs)`` on the value's owner, in one round trip, as the proxy calls methods."""
    return proxy._method_caller(proxy._rref, proxy._timeout, function, args, kwargs)


def method_name(method: Method) -> str:
    """Return the name of a method, for error messages."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))


class PendingCall:
    """A method call in progress; the thread that waits for it reads the reply.

    Another thread reads the reply of a future that nobody waits for, which takes longer. Use this if you are sure to
    wait soon.
    """

    __slots__ = ("_call", "_name", "_rref")

    def __init__(self, rref: RRef[Any], name: str, *args: Any) -> None:
        self._rref, self._name = rref, name
        self._call = _call_method(rref, UNSET_RPC_TIMEOUT, name, args, {}, rref._manager.agent.client.begin)

    def wait(self) -> Any:
        """Return the result, or raise what the method raised."""
        return self._rref._complete(self._call, self._name)

    def cancel(self) -> bool:
        """Cancel the call on both sides. Returns False if it is over."""
        return self._rref._manager.agent.cancel(self._call)


def _call_sync(rref: RRef[Any], timeout: float, name: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rref._complete(_call_method(rref, timeout, name, args, kwargs, rref._manager.agent.client.begin), name)


def _call_async(
    rref: RRef[Any],
    timeout: float,
    name: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[..., Future[Any]] = Future,
) -> Future[Any]:
    future = make(rref._manager.agent, keeps=rref)
    return _call_method(rref, timeout, name, args, kwargs, future.start)


def _call_remote(
    rref: RRef[Any], timeout: float, name: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[Any]:
    return _call_method(rref, timeout, name, args, kwargs, partial(rref._manager.create, keeps=rref))


R = TypeVar("R")


def _call_method(
    rref: RRef[Any],
    timeout: float,
    name: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    start: Callable[..., R],
) -> R:
    """Start a method call, numbered if the object is ordered."""
    if rref._user is not None:
        rref._ensure_usable(timeout)
    else:
        rref._check()
    if not isinstance(name, str):
        registry = rref._manager.agent.registry
        name, args = ("", (name, *args)) if registry is None else (registry.operation_name(name), args)
    elif type(name) is not str:
        name = str.__str__(name)  # messages cannot hold subclasses of str
    seconds = None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout)
    if not rref._ordered:
        return start(rref._owner, METHOD, args, kwargs, seconds, rref_access=RRefAccess(rref._id, name))
    positions: list[StreamPosition] = []

    def number() -> RRefAccess:
        positions.append(rref._manager.sequencer.next(rref._owner, rref._id))
        return RRefAccess(rref._id, name, positions[0])

    try:
        return start(rref._owner, METHOD, args, kwargs, seconds, rref_access=number)
    except BaseException:
        for position in positions:  # none, if it failed before it had a number
            rref._manager.skip_call(rref._owner, position)
        raise


def _renamed(error: CallError, text: str) -> CallError:
    """Return an error with another text that takes the place of the first one, notes and cause included."""
    made = _with_text(error, text)
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    made.__cause__ = error.__cause__
    return made


def _with_text(error: CallError, text: str) -> CallError:
    """Return an error of the same type and details with another text."""
    return type(error)(
        text,
        worker=error.worker,
        function=error.function,
        call=error.call,
        context=error.context,
        elapsed=error.elapsed,
    )


keep_uncompiled(__name__)
