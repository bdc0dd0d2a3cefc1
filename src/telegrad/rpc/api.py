"""The functions of `telegrad.rpc`, which act on the default agent of this process.

Names, signatures and defaults are those of torch.distributed.rpc.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from telegrad import waiting_report, worker_devices
from telegrad.agent.agent import Agent
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.bootstrap import check_token, start_agent
from telegrad.calls.call import Served, current_served
from telegrad.calls.tracebacks import hide_frames
from telegrad.connection.worker_record import check_name
from telegrad.default_agent import acting_as as acting_as  # documented as telegrad.rpc.api.acting_as
from telegrad.default_agent import default_agent, process_agent, set_default_agent, unset_default_agent
from telegrad.environment.terminal import explain_input
from telegrad.errors import RendezvousError, TelegradError
from telegrad.futures import Future
from telegrad.observe import exporters, local_socket
from telegrad.observe.service import Observation
from telegrad.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Options, given_timeout
from telegrad.rendezvous_search import IdTaken
from telegrad.rpc import interrupt_report
from telegrad.rpc.arguments import keyword, positional, several
from telegrad.rpc.dump_signal import DumpOnSignal
from telegrad.rpc.exposing import default_registry
from telegrad.rpc.group_rendezvous import Rendezvous, group_keys, report_failure
from telegrad.rpc.idempotence import MARK, RetryPolicy, retry_policy
from telegrad.rpc.init_arguments import complete, report_contradiction
from telegrad.rpc.interpreter_exit import close_at_exit
from telegrad.rpc.member_rendezvous import MemberRendezvous
from telegrad.rpc.retrying import RetriedCall, RetriedFuture
from telegrad.rpc.signals import WrappedHandlers, deliver_pending, pending_handlers
from telegrad.rpc.token import take_token
from telegrad.rref.handle import RRef
from telegrad.rref.manager import RRefManager
from telegrad.wire.devices import DeviceMap, parse_device_map
from telegrad.worker_info import Traffic, WorkerInfo

_log = logging.getLogger("telegrad")

Target = str | int | WorkerInfo


_signal_handlers: WrappedHandlers | None = None  # wrapped as long as there is a default agent
_dump_signal: DumpOnSignal | None = None  # the same


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

    If the group exists already, and its worker of this name is dead or has left, this one takes its place. Without a
    world size (or with 0), the group is open: workers may join it at any time, and this returns when all members know
    this one. A worker of an open group without a rank gets the lowest id that was never used. With
    `Options(members=...)`, it joins a group that exists through one of its members, without the store.

    Name, rank and world size default to TELEGRAD_NAME (or else ``worker<rank>``), RANK and WORLD_SIZE, or to what the
    launcher says: telegrad's own, torchrun, mpirun, srun, or a Kubernetes job (docs/clusters.md). `backend` is
    ignored; programs written for torch pass it.
    If the worker is assigned an accelerator, that becomes the current one: see `devices`.
    """
    existing = process_agent()
    if existing is not None:
        raise TelegradError(f"init_rpc was already called: this process is worker {existing.me.name!r}")
    explain_input()
    options = rpc_backend_options or Options(init_method=os.environ.get("TELEGRAD_INIT_METHOD", "env://"))
    name = os.environ.get("TELEGRAD_NAME") if name is None else name
    options = take_token(options)
    try:
        options, rank, world_size, prefix = complete(options, rank, world_size, os.environ)
    except RendezvousError as error:
        report_contradiction(options, name, rank, world_size, error, os.environ)
        raise
    try:
        if name is not None:
            check_name(name)
        check_token(options)  # before any worker waits for others
        options.settings()  # as above
        worker_devices.assigned(os.environ)  # as above
        by_members = bool(options.member_addresses())  # as above
    except Exception as error:
        if not options.members:
            report_failure(options, name, rank, world_size, error, prefix=prefix)
        raise
    rendezvous: Rendezvous | MemberRendezvous
    if by_members:
        rendezvous = MemberRendezvous.open(options, name, rank, world_size)
    else:
        rendezvous = Rendezvous.open(options, rank, world_size, prefix=prefix)
    rank = max(rendezvous.rank, 0)
    while True:
        try:
            join(f"worker{rank}" if name is None else name, rank, rendezvous, options, device_by_local_rank=True)
        except IdTaken as taken:  # only if this worker may have any id
            rank = taken.free
        else:
            return


def join(
    name: str,
    rank: int,
    rendezvous: Rendezvous | MemberRendezvous,
    options: Options,
    prepare: Callable[[Agent], None] | None = None,
    *,
    device_by_local_rank: bool = False,
) -> None:
    """Join a group as this process's default agent; see `telegrad.bootstrap.start_agent`.

    With `device_by_local_rank`, the current device is that of the local rank, unless TELEGRAD_DEVICES names another.
    """
    global _signal_handlers, _dump_signal
    options = take_token(options)
    device = worker_devices.choose_default(follow_rank=device_by_local_rank)
    handlers = WrappedHandlers()
    exchange = rendezvous.exchange_records

    def prepare_all(agent: Agent) -> None:
        Observation(agent)
        exporters.prepare(agent, options)
        if prepare is not None:
            prepare(agent)

    try:
        agent = start_agent(name, rank, exchange, options, rendezvous.address, prepare_all, default_registry, device)
        rendezvous.keep(agent)
        local_socket.listen(agent)
        exporters.serve(agent, options)
    except BaseException as error:
        handlers.restore()
        if not isinstance(error, IdTaken):
            rendezvous.failed(f"worker {name!r} (rank {rank})", group_keys(options), error)
            rendezvous.close(error)
        raise
    _signal_handlers = handlers
    _dump_signal = DumpOnSignal(agent)
    set_default_agent(agent)
    names = [record.name for record in agent.peers.records()] if _log.isEnabledFor(logging.INFO) else [name]
    _log.info("worker %r has joined the group of %s", name, waiting_report.workers(names))
    close_at_exit(agent)
    interrupt_report.install(name)


def shutdown(
    graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT, *, strict_references: bool = False
) -> None:
    """Leave the group. Does nothing if there is no agent.

    A graceful shutdown waits until all workers have called it and no call is in progress. It does not wait for workers
    that died. If that takes more than `timeout` seconds (0: no limit), it raises an error that names the missing
    workers. RRefs that are still held at the end of a graceful shutdown are logged. With `strict_references`, the
    shutdown then raises ReferencesHeld after everything is closed.
    """
    timeout, agent = given_timeout(timeout) or 0, process_agent()  # a wrong argument must not end the agent
    if agent is None:
        return
    try:
        agent.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)
    finally:
        unset_default_agent(agent)
        if _signal_handlers is not None:
            _signal_handlers.restore()
        if _dump_signal is not None:
            _dump_signal.restore()


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
    retries: int | None = None,
) -> Any:
    """Run `func` on worker `to` and return its result.

    `func` may also be a name that the worker registered (`register`), prefixed with ``@``, or in registered mode the
    name of a function that it exposes (`expose`). An exception that it raises is raised here with the remote traceback.
    `device_map` maps devices of this worker to devices of the callee, instead of `Options.device_maps`. `retries` says
    how often a call of an `idempotent` function is made again if the callee is lost, instead of the decorator.
    """
    agent = default_agent()
    if retries is not None or (MARK in func.__dict__ if type(func) is FunctionType else agent.registry is not None):
        policy = retry_policy(agent, func, retries)
        if policy is not None:
            return _retried_call(agent, policy, to, func, args, kwargs, timeout, device_map).run()
    try:
        return agent.client.call(
            to.name if isinstance(to, WorkerInfo) else to,
            func,
            args if type(args) is tuple else () if args is None else positional(args),
            kwargs if kwargs is None or type(kwargs) is dict else keyword(kwargs),
            None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
            None if device_map is None else parse_device_map(device_map, "device_map"),
        )
    except (Exception, KeyboardInterrupt) as error:
        hide_frames(error)
        raise


def rpc_async(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: DeviceMap | None = None,
    retries: int | None = None,
) -> Future[Any]:
    """Start `func` on worker `to` and return a future of its result. For `device_map` and `retries` see `rpc_sync`.

    If the arguments have changed when the call would be made again, it is not.
    """
    agent = default_agent()
    if retries is not None or (MARK in func.__dict__ if type(func) is FunctionType else agent.registry is not None):
        policy = retry_policy(agent, func, retries)
        if policy is not None:
            call = _retried_call(agent, policy, to, func, args, kwargs, timeout, device_map)
            return RetriedFuture(agent).start_retried(call, positional(args), kwargs)
    future: Future[Any] = Future(agent)
    future.start(
        to.name if isinstance(to, WorkerInfo) else to,
        func,
        args if type(args) is tuple else () if args is None else positional(args),
        kwargs if kwargs is None or type(kwargs) is dict else keyword(kwargs),
        None if timeout == UNSET_RPC_TIMEOUT else given_timeout(timeout),
        devices=None if device_map is None else parse_device_map(device_map, "device_map"),
    )
    if pending_handlers:
        deliver_pending()
    return future


def _retried_call(
    agent: Agent,
    policy: RetryPolicy,
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
    device_map: DeviceMap | None,
) -> RetriedCall:
    kwargs = None if kwargs is None else keyword(kwargs)
    devices = None if device_map is None else parse_device_map(device_map, "device_map")
    return RetriedCall(agent, policy, _target(to), func, positional(args), kwargs, given_timeout(timeout), devices)


def remote(
    to: Target,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    ordered: bool = False,
    device_map: DeviceMap | None = None,
    retries: int | None = None,
) -> RRef[Any]:
    """Run `func` on worker `to`, keep the result there, and return an RRef to it without waiting.

    Using the RRef raises the error of the function or of the call, if one failed. With `ordered`, the result is an
    actor: methods called through RRefs run one at a time, in each caller's order. For `device_map` see `rpc_sync`.
    A value is lost with its worker, so this is never called again: `retries` must be None or 0.
    """
    if retries:
        raise ValueError(
            "remote() is not called again after a worker is lost, because a value is lost with its worker at any time: "
            "catch WorkerLost, call wait_for_worker(), and create the RRef again"
        )
    references: RRefManager = default_agent().references
    devices = None if device_map is None else parse_device_map(device_map, "device_map")
    made: RRef[Any] = references.create(
        _target(to),
        func,
        positional(args),
        None if kwargs is None else keyword(kwargs),
        given_timeout(timeout),
        ordered=ordered,
        devices=devices,
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


def worker_names(workers: Sequence[Target]) -> list[str]:
    """Return the names of workers. Raises UnknownWorker for one that the group does not have."""
    return [default_agent().peers.find(_target(worker)).record.name for worker in several(workers)]


def _names(workers: Sequence[Target] | None) -> list[str] | None:
    return None if workers is None else worker_names(workers)


def all_gather(
    value: Any, workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the values that all `workers` (default: everybody) passed, by name. All of them must call this.

    It waits for as long as it takes, or for `timeout` seconds, and fails at once if one of the workers is lost. After 3
    seconds it logs for whom it waits. In an open group, everybody means all that are alive. Tensors arrive as leaves.
    """
    return default_agent().gather(value, _names(workers), timeout=given_timeout(timeout) or 0)


def barrier(workers: Sequence[Target] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all `workers` (default: everybody) have called this. It waits as `all_gather` does."""
    default_agent().gather(None, _names(workers), timeout=given_timeout(timeout) or 0, what="barrier()")


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
