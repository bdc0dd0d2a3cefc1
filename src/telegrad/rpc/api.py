"""The functions of `telegrad.rpc`, which act on the default agent of this process.

Names, signatures and defaults are those of torch.distributed.rpc.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad import worker_devices
from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.bootstrap import ExchangeRecords, ListenIfNeeded, Probe, check_token, start_agent
from telegrad.calls.call import Served, current_served
from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.worker_record import FoundGroup, WorkerRecord, check_name
from telegrad.default_agent import acting_as as acting_as  # documented as telegrad.rpc.api.acting_as
from telegrad.default_agent import default_agent, process_agent, set_default_agent, unset_default_agent
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Options, given_timeout
from telegrad.rendezvous import assemble
from telegrad.rendezvous_store import open_store
from telegrad.rpc.exposing import default_registry
from telegrad.rpc.interpreter_exit import close_at_exit
from telegrad.rpc.signals import WrappedHandlers, deliver_pending, pending_handlers
from telegrad.rpc.token import take_token
from telegrad.rref.handle import RRef
from telegrad.rref.manager import RRefManager
from telegrad.wire.devices import DeviceMap, parse_device_map
from telegrad.worker_info import Traffic, WorkerInfo

Target = str | int | WorkerInfo


_signal_handlers: WrappedHandlers | None = None  # wrapped as long as there is a default agent
_init_counter = itertools.count()


def is_available() -> bool:
    """Return whether RPC is available: always True."""
    return True


# -- init and shutdown ----------------------------------------------------------------------------------------


def init_rpc(
    name: str | None = None,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Options | None = None,
) -> None:
    """Join the group as worker `name` and return when every worker has joined.

    Name, rank and world size default to TELEGRAD_NAME (or else ``worker<rank>``), RANK and WORLD_SIZE, which
    ``telegrad run``, ``telegrad.launch`` and torchrun set. `backend` is ignored; programs written for torch pass it.
    If the worker is assigned an accelerator, that becomes the current one: see `devices`.
    """
    existing = process_agent()
    if existing is not None:
        raise TelegradError(f"init_rpc was already called: this process is worker {existing.me.name!r}")
    options = rpc_backend_options or Options(init_method=os.environ.get("TELEGRAD_INIT_METHOD", "env://"))
    name = os.environ.get("TELEGRAD_NAME") if name is None else name
    if name is not None:
        check_name(name)
    options = take_token(options)
    check_token(options)  # before any worker waits for others
    options.settings()  # as above
    worker_devices.assigned(os.environ)  # as above
    store, rank, world_size, address = open_store(options.init_method, rank, world_size, options.init_timeout)
    prefixed = PrefixStore(f"telegrad/{next(_init_counter)}", store)

    def exchange_records(
        me: WorkerRecord, keys: GroupKeys | None, listen_if_needed: ListenIfNeeded, probe: Probe
    ) -> FoundGroup:
        return FoundGroup(assemble(prefixed, me, keys, world_size, options.init_timeout, listen_if_needed))

    join(f"worker{rank}" if name is None else name, rank, exchange_records, options, address, device_by_local_rank=True)


def join(
    name: str,
    rank: int,
    exchange_records: ExchangeRecords,
    options: Options,
    store_address: tuple[str, int] | None = None,
    prepare: Callable[[Agent], None] | None = None,
    *,
    device_by_local_rank: bool = False,
) -> None:
    """Join a group as this process's default agent; see `telegrad.bootstrap.start_agent`.

    With `device_by_local_rank`, the current device is that of the local rank, unless TELEGRAD_DEVICES names another.
    """
    global _signal_handlers
    options = take_token(options)
    device = worker_devices.choose_default(follow_rank=device_by_local_rank)
    handlers = WrappedHandlers()
    try:
        agent = start_agent(name, rank, exchange_records, options, store_address, prepare, default_registry, device)
    except BaseException:
        handlers.restore()
        raise
    _signal_handlers = handlers
    set_default_agent(agent)
    close_at_exit(agent)


def shutdown(
    graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT, *, strict_references: bool = False
) -> None:
    """Leave the group. Does nothing if there is no agent.

    A graceful shutdown waits until all workers have called it and no call is in progress. It does not wait for workers
    that died. If that takes more than `timeout` seconds (0: no limit), it raises an error that names the missing
    workers. RRefs that are still held at the end of a graceful shutdown are logged. With `strict_references`, the
    shutdown then raises ReferencesHeld after everything is closed.
    """
    agent = process_agent()
    if agent is None:
        return
    try:
        agent.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)
    finally:
        unset_default_agent(agent)
        if _signal_handlers is not None:
            _signal_handlers.restore()


# -- calls ----------------------------------------------------------------------------------------------------


def _target(to: Target) -> str | int:
    return to.name if isinstance(to, WorkerInfo) else to


def rpc_sync(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: DeviceMap | None = None,
) -> Any:
    """Run `func` on worker `to` and return its result.

    `func` may also be a name that the worker registered (`register`), prefixed with ``@``, or in registered mode the
    name of a function that it exposes (`expose`). An exception that it raises is raised here with the remote traceback.
    `device_map` maps devices of this worker to devices of the callee, instead of `Options.device_maps`.
    """
    client = default_agent().client
    return client.call(
        to.name if isinstance(to, WorkerInfo) else to,
        func,
        tuple(args) if args else (),
        kwargs,
        None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
        None if device_map is None else parse_device_map(device_map, "device_map"),
    )


def rpc_async(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: DeviceMap | None = None,
) -> Future[Any]:
    """Start `func` on worker `to` and return a future of its result. For `device_map` see `rpc_sync`."""
    future: Future[Any] = Future(default_agent())
    future.start(
        to.name if isinstance(to, WorkerInfo) else to,
        func,
        tuple(args) if args else (),
        kwargs,
        None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
        devices=None if device_map is None else parse_device_map(device_map, "device_map"),
    )
    if pending_handlers:
        deliver_pending()
    return future


def remote(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    ordered: bool = False,
    device_map: DeviceMap | None = None,
) -> RRef[Any]:
    """Run `func` on worker `to`, keep the result there, and return an RRef to it without waiting.

    Using the RRef raises the error of the function or of the call, if one failed. With `ordered`, the result is an
    actor: methods called through RRefs run one at a time, in each caller's order. For `device_map` see `rpc_sync`.
    """
    references: RRefManager = default_agent().references
    devices = None if device_map is None else parse_device_map(device_map, "device_map")
    made: RRef[Any] = references.create(
        _target(to), func, tuple(args or ()), kwargs, given_timeout(timeout), ordered=ordered, devices=devices
    )
    if pending_handlers:
        deliver_pending()
    return made


def register(name: str, function: Callable[..., Any]) -> None:
    """Let other workers call `function` by name: ``rpc_sync(worker, "@name", args)``."""
    check_name(name)
    agent = default_agent()
    if agent.registry is not None:
        raise TelegradError(
            f"{name!r} cannot be registered in registered mode, where only exposed functions can be called: use "
            f"@telegrad.expose(name={name!r}) before init_rpc"
        )
    agent.register(name, function)


def current_call() -> Served | None:
    """Return the call that the current function serves: its caller, its deadline, whether it was cancelled."""
    return current_served.get()


# -- the group ------------------------------------------------------------------------------------------------


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the worker with that name, or this one if no name is given."""
    agent = default_agent()
    record = agent.me if worker_name is None else agent.peers.find(worker_name).record
    return WorkerInfo(record.name, record.id)


def get_worker_infos() -> list[WorkerInfo]:
    """Return all workers, ordered by id."""
    return [WorkerInfo(record.name, record.id) for record in default_agent().peers.records()]


def traffic() -> dict[str, Traffic]:
    """Return the bytes of messages sent to and received from each worker since this one joined the group."""
    counted = {peer.record.name: Traffic(*peer.traffic()) for peer in default_agent().peers.all()}
    return {name: counts for name, counts in counted.items() if any(counts)}


def get_rpc_timeout() -> float:
    """Return the default timeout of calls, in seconds."""
    return default_agent().settings.rpc_timeout


def _names(workers: Sequence[Target] | None) -> list[str] | None:
    if workers is None:
        return None
    return [default_agent().peers.find(_target(worker)).record.name for worker in workers]


def all_gather(
    value: Any, workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the values that all `workers` (default: everybody) passed, by name. All of them must call this."""
    return default_agent().gather(value, _names(workers), timeout=given_timeout(timeout))


def barrier(workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all `workers` (default: everybody) have called this."""
    default_agent().gather(None, _names(workers), timeout=given_timeout(timeout))


@contextlib.contextmanager
def session(name: str | None = None, *, strict_references: bool = False, **kwargs: Any) -> Iterator[Agent]:
    """Call `init_rpc` before and `shutdown` after the block. If the block raises, leave without waiting for others."""
    init_rpc(name, **kwargs)
    try:
        yield default_agent()
    except BaseException:
        shutdown(graceful=False)
        raise
    shutdown(strict_references=strict_references)


keep_uncompiled(__name__)
