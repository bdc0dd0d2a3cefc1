"""A reference to a value that lives on one worker, its owner, and can be named by any."""

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
from telegrad.protocol.ownership import LIFE, Id, Ref
from telegrad.wire.messages import RRefAccess, RRefBackwardReq
from telegrad.wire.reference import Reference
from telegrad.worker_info import WorkerInfo

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager

T = TypeVar("T")

FETCH = "@telegrad.to_here"
METHOD = "@telegrad.method"


class UserRRef:
    """What is known here of one fork of a reference."""

    __slots__ = ("confirmed", "creation", "creator", "error", "fork", "given_up", "lost", "settled", "waiters")

    def __init__(self, fork: Id, *, creator: bool = False) -> None:
        self.fork = fork
        self.creator = creator
        """This worker made the call that makes the value."""
        self.confirmed = False
        self.settled = False
        """Confirmed, or never to be."""
        self.lost = False
        """The owner is."""
        self.given_up = False
        """The owner has the value no more, because the worker that passed the reference on to us was lost."""
        self.creation: Call | None = None
        """The call that made the value, when it has ended."""
        self.error: CallError | None = None
        """Why that call was not answered."""
        self.waiters: list[Callable[[], None]] = []


class RRef(Reference, Generic[T]):
    """A reference to a value: ``RRef(value)`` to one that lives here, `remote` makes one elsewhere.

    It can be sent to any worker, in the arguments and results of calls. The owner keeps the value for as long as any
    RRef of it is alive anywhere. `release`, the end of a ``with`` block or the end of the object gives it up.
    """

    __slots__ = ("__weakref__", "_book", "_id", "_ordered", "_owner", "_released", "_use")

    _book: RRefManager
    _id: Ref
    _use: UserRRef | None
    _owner: int
    _ordered: bool
    _released: bool

    def __new__(cls, value: Any = None, type_hint: object = None, *, ordered: bool = False) -> Self:
        return default_agent().references.own(value, ordered=ordered, cls=cls)  # type: ignore[no-any-return]

    @classmethod
    def _make(cls, book: RRefManager, rref: Ref, use: UserRRef | None, owner: int, ordered: bool) -> Self:
        made = object.__new__(cls)
        made._book, made._id, made._use, made._owner, made._ordered = book, rref, use, owner, ordered
        made._released = False
        return made

    # -- who ------------------------------------------------------------------------------------------------------

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._use is None

    def owner(self) -> WorkerInfo:
        """The worker that the value lives on."""
        return WorkerInfo(self.owner_name(), self._owner)

    def owner_name(self) -> str:
        """Its name."""
        return self._book.name_of(self._owner)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to know of this reference."""
        return self._use is None or self._use.confirmed

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        return f"RRef({self._id[0]}:{self._id[1] & ((1 << LIFE) - 1)} on worker {self.owner_name()!r}{state})"

    # -- the value ------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value: itself on its owner, elsewhere a copy, with its autograd edge in a context.

        Waits until there is one. Raises what the function raised that was to make it, each time.
        """
        if self._use is None:
            return self._local(timeout)
        self._ready(timeout)
        visit = RRefAccess(self._id, "")
        call = self._book.agent.client.begin(self._owner, FETCH, (), None, given_timeout(timeout), visit=visit)
        return self._complete(call, "to_here")  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """The value, on its owner. Waits until there is one."""
        if self._use is not None:
            raise TelegradError(
                f"{self!r}: can't call localValue() on a user: worker {self._book.agent.me.name!r} is not its owner. "
                "UserRRef to_here() for a copy, or rpc_sync() to call a method where the value is"
            )
        return self._local(UNSET_RPC_TIMEOUT)

    def _local(self, timeout: float) -> T:
        self._check()
        return self._book.value(self._id, self._book.deadline(timeout))  # type: ignore[no-any-return]

    def _check(self) -> None:
        self._book.check_open()
        if self._released:
            raise self.released_error()

    def released_error(self) -> ReferenceGone:
        """What a use after the end raises."""
        return ReferenceGone(f"{self!r} was released, and cannot be used any more")

    def _ready(self, timeout: float) -> None:
        """Make sure that the owner knows of this reference; its creator need not wait for that."""
        use, book = self._use, self._book
        assert use is not None
        if self._released or book.closed or book.agent.closed:
            self._check()
        if not use.settled and not use.creator:
            book.wait_for(use, self, timeout)
            self._check()
        if use.lost or use.given_up or use.error is not None:
            self._usable(use)

    def _usable(self, use: UserRRef) -> None:
        if use.lost:
            raise self._book.owner_lost(self._id, self._owner)
        if use.given_up:
            raise ReferenceGone(
                f"{self!r} names nothing: the worker that passed it on was lost, and its owner knew of no other holder"
            )
        if use.error is not None:
            raise _about(use.error, f"{self!r} has no value: {use.error}") from use.error

    def _complete(self, call: Call, what: Method) -> Any:
        calling = self._book.agent.client
        try:
            calling.wait(call)
        except BaseException:
            calling.cancel(call, "the caller was interrupted")
            raise
        if call.error is not None and isinstance(call.error, WorkerLost | DeadlineExceeded):
            raise _about(call.error, f"{shown(what)}() of {self!r}: {call.error}") from call.error
        return calling.result(call)

    # -- methods of the value ---------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """Methods of the value, run on its owner: ``rref.rpc_sync().method(*args)`` returns the result."""
        return Proxy(self, timeout, _call_sync)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """The same, with a future of the result."""
        return Proxy(self, timeout, _call_async)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        """The same, with a reference to the result, which stays on the owner."""
        return Proxy(self, timeout, _call_remote)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, on its owner: a distributed one in that context; with -1 a local one."""
        if self._use is None:
            self._check()
            self._book.run_backward(self._owner, self._id, dist_autograd_ctx_id, retain_graph)
            return
        self._ready(0)
        context = self._book.agent.autograd.contexts.get(dist_autograd_ctx_id)
        if context is not None:
            context.stepped.clear()  # what begins there is not stepped in the pass, see telegrad.optim
        call = self._book.agent.client.ask(
            self._owner,
            f"backward of {self!r}",
            lambda number: RRefBackwardReq(number, self._id, int(dist_autograd_ctx_id), retain_graph),
            0,
        )
        self._complete(call, "backward")

    # -- the end ----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give this reference up now. Others of the same value are not touched."""
        if not self._released:
            self._released = True
            self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Runs in any thread, at any moment: see RRefManager.dropped.
        if not getattr(self, "_released", True):
            self._give_up()

    def _give_up(self) -> None:
        self._book.dropped(self._id, self._use.fork if self._use is not None else None, self._owner, self._ordered)

    # -- PyTorch's private names --------------------------------------------------------------------------------------

    def _get_future(self) -> Future[Any]:
        """A future of the call that makes the value; it carries no value."""
        return self._book.future_of(self)


Method = str | Callable[..., Any]
"""The name of a method of the value, or a function that gets the value as its first argument."""

Way = Callable[[RRef[Any], float, Method, tuple[Any, ...], dict[str, Any]], Any]


class Proxy:
    """Stands for the value of a reference: what is called on it is called where the value lives, in one round trip."""

    # With a dict, though an empty one: else code that looks at any object's __dict__ would get a method of the value.
    __slots__ = ("__dict__", "_rref", "_timeout", "_way")

    def __init__(self, rref: RRef[Any], timeout: float, way: Way) -> None:
        self._rref = rref
        self._timeout = timeout
        self._way = way

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._way(self._rref, self._timeout, name, args, kwargs)

        method.__name__ = name
        return method


def call_through(proxy: Proxy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(value, *args, **kwargs)`` where the value lives, in the way of the proxy, in one round trip."""
    return proxy._way(proxy._rref, proxy._timeout, function, args, kwargs)


def shown(method: Method) -> str:
    """What is called, for people."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))


def _call_sync(rref: RRef[Any], timeout: float, name: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return rref._complete(_visit(rref, timeout, name, args, kwargs, rref._book.agent.client.begin), name)


class Begun:
    """A call of a method that has begun, and whose answer is read by the thread that waits for it.

    A future has its answer read by another thread, if nobody waits for it, which takes time; so this is for callers
    that are sure to wait soon.
    """

    __slots__ = ("_call", "_name", "_rref")

    def __init__(self, rref: RRef[Any], name: str, *args: Any) -> None:
        self._rref, self._name = rref, name
        self._call = _visit(rref, UNSET_RPC_TIMEOUT, name, args, {}, rref._book.agent.client.begin)

    def wait(self) -> Any:
        """The result; raises what the method raised."""
        return self._rref._complete(self._call, self._name)

    def cancel(self) -> bool:
        """Give the call up and tell the callee. False if it has ended."""
        return self._rref._book.agent.cancel(self._call)


def _call_async(
    rref: RRef[Any],
    timeout: float,
    name: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[..., Future[Any]] = Future,
) -> Future[Any]:
    future = make(rref._book.agent, keeps=rref)
    return _visit(rref, timeout, name, args, kwargs, future.start)


def _call_remote(
    rref: RRef[Any], timeout: float, name: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[Any]:
    return _visit(rref, timeout, name, args, kwargs, partial(rref._book.create, keeps=rref))


R = TypeVar("R")


def _visit(
    rref: RRef[Any],
    timeout: float,
    name: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    start: Callable[..., R],
) -> R:
    """Start a call of a method; if its object takes calls in order, with its number."""
    if rref._use is not None:
        rref._ready(timeout)
    else:
        rref._check()
    if not isinstance(name, str):
        name, args = "", (name, *args)
    elif type(name) is not str:
        name = str.__str__(name)  # no message holds a string of the user's own kind
    seconds = None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout)
    if not rref._ordered:
        return start(rref._owner, METHOD, args, kwargs, seconds, visit=RRefAccess(rref._id, name))
    turn = rref._book.next_turn(rref._owner, rref._id)
    try:
        return start(rref._owner, METHOD, args, kwargs, seconds, visit=RRefAccess(rref._id, name, turn))
    except BaseException:
        rref._book.skip_turn(rref._owner, turn)
        raise


def _about(error: CallError, text: str) -> CallError:
    return type(error)(
        text,
        worker=error.worker,
        function=error.function,
        call=error.call,
        context=error.context,
        elapsed=error.elapsed,
    )


keep_uncompiled(__name__)
