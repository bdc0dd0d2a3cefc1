"""`RRef`, a handle of a value that one worker owns and any worker can reference, and its proxies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import Call
from telegrad.default_agent import default_agent
from telegrad.errors import CallError, DeadlineExceeded, ReferenceGone, TelegradError, WorkerLost
from telegrad.futures import Future
from telegrad.options import UNSET_RPC_TIMEOUT, given_timeout
from telegrad.protocol.rref_ids import COUNTER_BITS, ForkId, RRefId
from telegrad.rref.confirmation import creation_future, wait_until_settled
from telegrad.rref.ids import describe
from telegrad.wire.messages import Failure, RRefAccess, RRefBackwardReq
from telegrad.wire.reference import Reference
from telegrad.worker_info import WorkerInfo

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager

T = TypeVar("T")

FETCH = "@telegrad.to_here"
METHOD = "@telegrad.method"


class UserRRef:
    """The state of one fork of a reference on a worker that is not the owner."""

    __slots__ = ("confirmed", "creation", "creator", "error", "fork", "owner_lost", "refused", "settled", "waiters")

    def __init__(self, fork: ForkId, *, creator: bool = False) -> None:
        self.fork = fork
        self.creator = creator
        """This worker made the call that computes the value."""
        self.confirmed = False
        self.settled = False
        """Confirmed by the owner, or never going to be."""
        self.owner_lost = False
        self.refused = False
        """The owner no longer has the value, because the worker that sent us the reference was lost."""
        self.creation: Call | None = None
        """The call that computes the value, once it is over."""
        self.error: CallError | None = None
        """Why that call failed."""
        self.waiters: list[Callable[[], None]] = []


class RRef(Reference, Generic[T]):
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

    # -- value ------------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value itself on its owner, or a copy elsewhere. In a context, gradients flow through the copy.

        Waits until the value is computed. If its function raised, every call of `to_here` raises that exception.
        """
        if self._user is None:
            return self._local(timeout)
        self._ensure_usable(timeout)
        access = RRefAccess(self._id, "")
        call = self._manager.agent.client.begin(
            self._owner, FETCH, (), None, given_timeout(timeout), rref_access=access
        )
        return self._complete(call, "to_here")  # type: ignore[no-any-return]

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
            raise WorkerLost(f"{describe(self._id)} is gone: worker {name!r}, its owner, is lost", worker=name)
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
            raise _with_text(call.error, f"{method_name(what)}() of {self!r}: {call.error}") from call.error
        user = self._user
        if user is not None and user.error is not None and type(call.answer) is Failure:
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
            return self._method_caller(self._rref, self._timeout, name, args, kwargs)

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
        name, args = "", (name, *args)
    elif type(name) is not str:
        name = str.__str__(name)  # messages cannot hold subclasses of str
    seconds = None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout)
    if not rref._ordered:
        return start(rref._owner, METHOD, args, kwargs, seconds, rref_access=RRefAccess(rref._id, name))
    position = rref._manager.sequencer.next(rref._owner, rref._id)
    try:
        return start(rref._owner, METHOD, args, kwargs, seconds, rref_access=RRefAccess(rref._id, name, position))
    except BaseException:
        rref._manager.skip_call(rref._owner, position)
        raise


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
