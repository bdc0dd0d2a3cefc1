"""What users call: the process's default agent, and the functions that act on it.

Names, signatures and defaults are those of torch.distributed.rpc.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.bootstrap import check_token, start_agent
from telegrad.calls.call import Served, current_served
from telegrad.connection.worker_record import WorkerRecord, check_name
from telegrad.default_agent import acting_as as acting_as  # documented as telegrad.rpc.api.acting_as
from telegrad.default_agent import default_agent, process_agent, set_default_agent, unset_default_agent
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Options, given_timeout
from telegrad.rendezvous import assemble, open_store
from telegrad.rpc.at_exit import close_at_exit
from telegrad.rpc.signals import Installation, deliver_kept, keeping
from telegrad.rref.handle import RRef
from telegrad.rref.manager import RRefManager
from telegrad.worker_info import Traffic, WorkerInfo

Target = str | int | WorkerInfo


_handlers: Installation | None = None  # of signals, as long as there is a default agent; the main thread's
_times_initialized = itertools.count()


def is_available() -> bool:
    """Whether remote calls can be made at all: always."""
    return True


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
    existing = process_agent()
    if existing is not None:
        raise TelegradError(f"init_rpc was called before: this process is worker {existing.me.name!r}")
    options = rpc_backend_options or Options(init_method=os.environ.get("TELEGRAD_INIT_METHOD", "env://"))
    name = os.environ.get("TELEGRAD_NAME") if name is None else name
    if name is not None:
        check_name(name)
    check_token(options)  # before anybody waits for others
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
    """Join a group as this process's default agent; see `telegrad.bootstrap.start_agent`."""
    global _handlers
    handlers = Installation()
    try:
        agent = start_agent(name, rank, meet, options, where, prepare)
    except BaseException:
        handlers.undo()
        raise
    _handlers = handlers
    set_default_agent(agent)
    close_at_exit(agent)


def shutdown(
    graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT, *, strict_references: bool = False
) -> None:
    """Leave the group. Does nothing if there is no agent.

    A graceful shutdown waits until all workers have called it and no call is under way; `timeout` in seconds bounds
    that (0: it does not), and its error says who was waited for. The others do not wait for a worker that died.
    References that are held at the end of a graceful shutdown are listed in the log; with `strict_references` they are
    an error, ReferencesHeld, which is raised when everything is closed.
    """
    agent = process_agent()
    if agent is None:
        return
    try:
        agent.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)
    finally:
        unset_default_agent(agent)
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
    calling = default_agent().client
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
    references: RRefManager = default_agent().references
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
    return current_served.get()


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
