"""What users call: the process's default agent, and the functions that act on it.

Names, signatures and defaults are those of torch.distributed.rpc.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.agent.calls import Served, acting, serving
from telegrad.agent.group import WorkerRecord, check_name
from telegrad.agent.token import find_token
from telegrad.autograd.compiling import keep_uncompiled
from telegrad.autograd.service import Autograd
from telegrad.errors import NotInitialized, RendezvousError, TelegradError, TokenError
from telegrad.rpc.exiting import close_at_exit
from telegrad.rpc.futures import Future
from telegrad.rpc.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Options, given_timeout
from telegrad.rpc.references import References
from telegrad.rpc.rendezvous import assemble, open_store
from telegrad.rpc.rref import RRef
from telegrad.rpc.signals import Installation, deliver_kept, keeping
from telegrad.rpc.worker_info import Traffic, WorkerInfo
from telegrad.transport.addresses import (
    choose_addresses,
    host_identity,
    runtime_directory,
    socket_path,
    sweep_dead_sockets,
)
from telegrad.transport.base import Transport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport, format_tcp
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime

Target = str | int | WorkerInfo

_NEEDS_TOKEN = "Run `telegrad token` once and start every worker with TELEGRAD_TOKEN set to what it prints."

_lock = threading.Lock()  # protects _default
_default: Agent | None = None
_handlers: Installation | None = None  # of signals, as long as there is a default agent; the main thread's
_times_initialized = itertools.count()


def is_available() -> bool:
    """Whether remote calls can be made at all: always."""
    return True


def default_agent() -> Agent:
    """The agent that the functions of this module act on: that which runs the current function, else the process's."""
    served = serving.get()
    agent = served.agent if served is not None else acting.get() or _default
    if agent is None:
        raise NotInitialized("there is no agent in this process: call telegrad.init_rpc() first")
    return agent


def set_default_agent(agent: Agent | None) -> None:
    """Make `agent` the one that the functions of this module act on."""
    global _default
    with _lock:
        _default = agent


@contextlib.contextmanager
def acting_as(agent: Agent) -> Iterator[None]:
    """Let the functions of this module act on `agent` in a block: for processes with several agents."""
    token = acting.set(agent)
    try:
        yield
    finally:
        acting.reset(token)


# -- init and shutdown ----------------------------------------------------------------------------------------


def init_rpc(
    name: str | None = None,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Options | None = None,
) -> None:
    """Join the group as worker `name`, and return when every worker has joined.

    Name, rank and world size default to TELEGRAD_NAME (else ``worker<rank>``), RANK and WORLD_SIZE, which
    ``telegrad run``, ``telegrad.launch`` and torchrun set. `backend` is there for programs written for torch.
    """
    with _lock:
        if _default is not None:
            raise TelegradError(f"init_rpc was called before: this process is worker {_default.me.name!r}")
    options = rpc_backend_options or Options(init_method=os.environ.get("TELEGRAD_INIT_METHOD", "env://"))
    name = os.environ.get("TELEGRAD_NAME") if name is None else name
    if name is not None:
        check_name(name)
    _check_token(options)  # before anybody waits for others
    store, rank, world_size, where = open_store(options.init_method, rank, world_size, options.init_timeout)
    prefixed = PrefixStore(f"telegrad/{next(_times_initialized)}", store)

    def meet(me: WorkerRecord) -> list[WorkerRecord]:
        return assemble(prefixed, me, world_size, options.init_timeout)

    join(f"worker{rank}" if name is None else name, rank, meet, options, where)


def join(
    name: str,
    rank: int,
    meet: Callable[[WorkerRecord], Sequence[WorkerRecord]],
    options: Options,
    where: tuple[str, int] | None = None,
    prepare: Callable[[Agent], None] | None = None,
) -> None:
    """Join a group: `meet` is told who we are, and says who all are.

    `where` is host and port of where they meet, if that has any. `prepare` is called with the agent before it serves.
    """
    global _handlers
    token, allowed = _check_token(options)
    handlers = Installation()
    agent = None
    try:
        agent = _make_agent(name, rank, token, allowed, options, where)
        group = meet(agent.me)
        _check_reachable(agent.me, group, token)
        if prepare is not None:
            prepare(agent)
        agent.start(group)
    except BaseException:
        if agent is not None:
            agent.close()
        handlers.undo()
        raise
    _handlers = handlers
    set_default_agent(agent)
    close_at_exit(agent)


def _check_token(options: Options) -> tuple[bytes | None, Sequence[str]]:
    """The group's token, if there is one, and the transports that may be used."""
    token = find_token(options.token)
    allowed = options.allowed_transports()
    if "unix" not in allowed and token is None:
        raise TokenError(f"tcp connections need a group token, and there is none. {_NEEDS_TOKEN}")
    return token, allowed


def _make_agent(
    name: str,
    rank: int,
    token: bytes | None,
    allowed: Sequence[str],
    options: Options,
    rendezvous: tuple[str, int] | None,
) -> Agent:
    runtime = RealRuntime()
    incarnation = runtime.random_bits(63)
    transports: list[tuple[Transport, str]] = []
    host = ""
    if "unix" in allowed:
        directory = runtime_directory()
        sweep_dead_sockets(directory)
        host = host_identity(directory)
        transports.append((UnixTransport(), f"unix://{socket_path(directory, name, incarnation)}"))
    if "tcp" in allowed and token is not None:
        bind, advertise = choose_addresses(
            rendezvous_host=rendezvous[0] if rendezvous else None,
            rendezvous_port=rendezvous[1] if rendezvous else None,
            bind=options.bind,
            advertise=options.advertise,
            interface=options.interface,
        )
        transports.append((TcpTransport(advertise=advertise), format_tcp(bind, 0)))
    agent = Agent(
        name,
        rank,
        transports=transports,
        poller=SocketPoller(options.microseconds_of_spin()),
        runtime=runtime,
        token=token,
        host=host,
        main=_main_program(),
        incarnation=incarnation,
        settings=options.settings(),
    )
    Autograd(agent)
    References(agent)
    return agent


def _main_program() -> str:
    """What identifies the program that runs as ``__main__``; empty for an interactive one, which is like no other."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not path:
        return ""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def _check_reachable(me: WorkerRecord, group: Sequence[WorkerRecord], token: bytes | None) -> None:
    mine = {address.partition("://")[0] for address in me.addresses}
    for record in group:
        theirs = {address.partition("://")[0] for address in record.addresses}
        if "tcp" in mine & theirs or ("unix" in mine & theirs and record.host == me.host):
            continue
        if token is None:
            raise TokenError(
                f"worker {record.name!r} is on another host or belongs to another user, which takes a tcp "
                f"connection, and that needs a group token. {_NEEDS_TOKEN}"
            )
        raise RendezvousError(
            f"worker {me.name!r} (at {', '.join(me.addresses)}) and worker {record.name!r} (at "
            f"{', '.join(record.addresses)}) have no transport in common; see TELEGRAD_TRANSPORTS and TELEGRAD_TOKEN"
        )


def shutdown(
    graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT, *, strict_references: bool = False
) -> None:
    """Leave the group. Does nothing if there is no agent.

    A graceful shutdown waits until all workers have called it and no call is under way; `timeout` in seconds bounds
    that (0: it does not), and its error says who was waited for. The others do not wait for a worker that died.
    References that are held at the end of a graceful shutdown are listed in the log; with `strict_references` they are
    an error, ReferencesHeld, which is raised when everything is closed.
    """
    agent = _default
    if agent is None:
        return
    try:
        agent.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)
    finally:
        with _lock:
            if _default is agent:
                globals()["_default"] = None
        if _handlers is not None:
            _handlers.undo()


# -- calls ----------------------------------------------------------------------------------------------------


def _target(to: Target) -> str | int:
    return to.name if isinstance(to, WorkerInfo) else to


def rpc_sync(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func` on worker `to` and return its result.

    `func` may also be a name that the worker registered (`register`), with an ``@`` before it. An exception that it
    raises there is raised here, with the remote traceback.
    """
    calling = default_agent().calling
    return calling.call(
        to.name if isinstance(to, WorkerInfo) else to,
        func,
        tuple(args) if args else (),
        kwargs,
        None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
    )


def rpc_async(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Start `func` on worker `to`, and return a future of its result."""
    future: Future[Any] = Future(default_agent())
    future.start(
        to.name if isinstance(to, WorkerInfo) else to,
        func,
        tuple(args) if args else (),
        kwargs,
        None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
    )
    if keeping:
        deliver_kept()
    return future


def remote(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    ordered: bool = False,
) -> RRef[Any]:
    """Run `func` on worker `to`, keep the result there, and return a reference to it, at once.

    An error of the function, or of the call, shows when the reference is used. With `ordered`, methods of the result
    that are called through references run one at a time, in each caller's order: the result is an actor.
    """
    references: References = default_agent().references
    made: RRef[Any] = references.create(
        _target(to), func, tuple(args or ()), kwargs, given_timeout(timeout), ordered=ordered
    )
    if keeping:
        deliver_kept()
    return made


def register(name: str, function: Callable[..., Any]) -> None:
    """Let other workers call `function` by name: ``rpc_sync(worker, "@name", args)``."""
    check_name(name)
    default_agent().register(name, function)


def current_call() -> Served | None:
    """The call that the current function serves: who made it, its deadline, whether it was cancelled."""
    return serving.get()


# -- the group ------------------------------------------------------------------------------------------------


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker of that name; this one, if none is given."""
    agent = default_agent()
    record = agent.me if worker_name is None else agent.peers.find(worker_name).record
    return WorkerInfo(record.name, record.id)


def get_worker_infos() -> list[WorkerInfo]:
    """All workers, by id."""
    return [WorkerInfo(record.name, record.id) for record in default_agent().peers.records()]


def traffic() -> dict[str, Traffic]:
    """How many bytes of messages went to each worker, and came from it, since this one joined the group."""
    counted = {peer.record.name: Traffic(*peer.traffic()) for peer in default_agent().peers.all()}
    return {name: told for name, told in counted.items() if any(told)}


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    return default_agent().settings.rpc_timeout


def _names(workers: Sequence[Target] | None) -> list[str] | None:
    if workers is None:
        return None
    return [default_agent().peers.find(_target(worker)).record.name for worker in workers]


def all_gather(
    value: Any, workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Bring a value, and get the values of all workers by name. Each of `workers` (default: everybody) calls this."""
    return default_agent().gather(value, _names(workers), timeout=given_timeout(timeout))


def barrier(workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all `workers` (default: everybody) have called this."""
    default_agent().gather(None, _names(workers), timeout=given_timeout(timeout))


@contextlib.contextmanager
def session(name: str | None = None, *, strict_references: bool = False, **kwargs: Any) -> Iterator[Agent]:
    """`init_rpc` before and `shutdown` after a block; if the block raised, without waiting for the others."""
    init_rpc(name, **kwargs)
    try:
        yield default_agent()
    except BaseException:
        shutdown(graceful=False)
        raise
    shutdown(strict_references=strict_references)


keep_uncompiled(__name__)
