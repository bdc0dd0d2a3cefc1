"""One worker as an object: it calls other workers, serves their calls, and detects when they are gone.

Nothing here is global, so several agents can live in one process. `telegrad.default_agent` holds the process's own.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec.structs import replace as replace_fields

from telegrad.agent.shutdown import Shutdown
from telegrad.calls.admission import Admission
from telegrad.calls.call import Access, Call
from telegrad.calls.client import Client
from telegrad.calls.collectives import Collectives
from telegrad.calls.dispatch import Dispatcher
from telegrad.calls.incoming_replies import IncomingReplies
from telegrad.calls.oneway import Handler, OneWay
from telegrad.calls.pipeline import Pipeline
from telegrad.calls.plain_exceptions import PLAIN
from telegrad.calls.registry import Registry
from telegrad.calls.server import Server
from telegrad.calls.service_names import GATHER
from telegrad.calls.tracebacks import short_tracebacks
from telegrad.calls.undelivered import Undeliverable
from telegrad.connection import joining
from telegrad.connection.accept import PendingConnections
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.joining import Joining
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import NotInitialized
from telegrad.execution.event_loop import EventLoop
from telegrad.execution.executor import Executor
from telegrad.settings import AgentSettings
from telegrad.transport.base import Listener, Poller, Transport
from telegrad.transport.device import find_direct_path
from telegrad.waiting import Runtime
from telegrad.wire.codec import REGISTERED
from telegrad.wire.devices import DeviceCounts, DevicePairs, local_devices
from telegrad.wire.messages import Creation

if TYPE_CHECKING:
    from telegrad.backward.engine import Autograd
    from telegrad.observe.profiling.agent import Profiling
    from telegrad.rref.manager import RRefManager

_log = logging.getLogger("telegrad")


class Agent:
    """One worker of a group.

    It has its addresses from the start, and serves calls once `start` has given it the group.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        *,
        transports: Sequence[tuple[Transport, str]],
        poller: Poller,
        runtime: Runtime,
        token: bytes | None = None,
        host: str = "",
        main: str = "",
        incarnation: int | None = None,
        generation: int = 0,
        settings: AgentSettings | None = None,
        registry: Registry | None = None,
        devices: DeviceCounts | None = None,
    ) -> None:
        check_name(name)
        check_id(worker_id)
        settings = settings or AgentSettings()
        keys = None if token is None else derive_keys(token)
        if settings.accept == "registered":
            # A peer could change what is in shared memory after it was checked, and while it is decoded.
            settings = replace(settings, shared_memory=0)
        self.executor = Executor(runtime, poller, name=name, max_running=settings.running)
        self.local = local = LocalWorker(name, settings, runtime, poller, self.executor, keys)
        self.runtime, self.poller = runtime, poller
        self.peers = Peers(local, [transport for transport, _ in transports])
        self.pending = PendingConnections(local, self.peers)
        self.registry: Registry | None = None
        """What other workers may call, in registered mode."""
        self.pipeline = Pipeline()
        if settings.accept == "registered":
            self.registry = registry or Registry()
            self.pipeline = Pipeline(REGISTERED, PLAIN)
        self.pipeline.direct = local.direct = find_direct_path(settings)
        self.client = Client(local, self.peers, self.pipeline, self.registry)
        self.wait, self.result, self.cancel = self.client.wait, self.client.result, self.client.cancel
        self.server = Server(self, local, self.pipeline, EventLoop(runtime, self.executor))
        self.oneway = OneWay(local, self.peers, self.pipeline)
        replies = IncomingReplies(self.client.completion, self.pipeline)
        self.admission = Admission(local, self.pipeline, self.server)
        dispatcher = Dispatcher(self.client.completion, replies, self.server, self.oneway, self.admission)
        self.peers.deliver = dispatcher.deliver
        self.peers.undelivered = Undeliverable(local, replies, self.server, dispatcher.deliver).report
        self.peers.relaying.attach(self.oneway, self.pending.adopt)
        self.collectives = Collectives(local, self.peers, self.call, self.call_async, self.client)
        self.peers.lost_workers.observe(dispatcher.peer_lost, lambda: True)
        self.peers.lost_workers.observe(self.collectives.peer_lost, lambda: bool(local.closed))
        self.register(GATHER[1:], self.collectives.arrive, deferred=True)
        self.joining = Joining(local, self.peers, self.call)
        self.register(joining.SERVICE[1:], self.joining.describe)
        self.autograd: Autograd = cast("Autograd", _NotAdded(name, "distributed autograd"))
        """Distributed autograd, once `telegrad.bootstrap` has added it."""
        self.references: RRefManager = cast("RRefManager", _NotAdded(name, "references"))
        """The references of this agent, once `telegrad.bootstrap` has added them."""
        self.profiling: Profiling = cast("Profiling", _NotAdded(name, "remote profiling"))
        """Remote profiling, once `telegrad.bootstrap` has added it."""
        self.listeners: list[Listener] = []
        self.shutdown_protocol = Shutdown(self)
        self.peers.lost_workers.on_goodbye = self.shutdown_protocol.heard
        self.peers.lost_workers.on_given_up = self.collectives.shutdown_report.give_up
        _listen(self, transports)
        self.me = local.me = WorkerRecord(
            name=name,
            id=worker_id,
            incarnation=runtime.random_bits(63) if incarnation is None else incarnation,
            generation=generation,
            addresses=tuple(listener.address for listener in self.listeners),
            host=host,
            main=main,
            tls=any(transport.encrypted for transport, _ in transports),
            accept=settings.accept,
            devices=local_devices() if devices is None else devices,
        )
        self.started = runtime.now()
        """When it was made."""
        _agents.add(self)

    def start(self, group: Iterable[WorkerRecord], *, is_open: bool = False) -> None:
        """Start serving in a new group of these workers, which include this one."""
        self.peers.set_group(group, is_open=is_open)
        self._serve()

    def join(
        self,
        members: Iterable[WorkerRecord],
        *,
        deadline: float,
        vouched: bool = False,
        is_open: bool = False,
        generation: int = -1,
    ) -> None:
        """Join a group that exists, and return when all members that can be reached know this worker.

        `members` may include an earlier incarnation of this worker, whose place it then takes. `vouched` says that an
        authority has given this worker its generation. Otherwise members vote, until `deadline`. Not so if the worker
        takes the place of one that has left an open group in order: then it needs its `generation` only. Raises
        NotAMember, or GroupEnded if there is no member any more.
        """
        members = list(members)
        if generation > self.me.generation:
            self.me = self.local.me = replace_fields(self.me, generation=generation)
        others = [record for record in members if record.name != self.me.name]
        self.peers.members.form([self.me, *others], is_open=is_open)
        self.peers.members.set_voting(False)  # the one before it may have voted: see `introduce`
        self._serve()
        if not vouched and generation < 0 and not (is_open and len(others) == len(members)):
            generation, others = self.joining.get_votes(members, deadline)
            self.me = self.local.me = replace_fields(self.me, generation=generation)
        self.peers.join_group([*others, self.me])
        self.joining.introduce(deadline)

    def _serve(self) -> None:
        for listener in self.listeners:
            if listener.is_open:
                self.pending.watch(listener)
        self.executor.start()
        self.peers.relaying.refresh()

    # -- calls ------------------------------------------------------------------------------------------------

    def call(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        devices: DevicePairs | None = None,
    ) -> Any:
        """Run a function on a worker and return its result.

        `function` may be ``@`` and the name of a registered function. `timeout` is in seconds, 0 for none; the default
        is that of the settings. A call made while serving another call never outlives the deadline of that call.
        `devices` is the device map of this call; the default is that of the settings.
        """
        return self.client.call(to, function, args, kwargs, timeout, devices)

    def begin(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        rref_access: Access | None = None,
    ) -> Call:
        """Start a call, for `wait` and then `result`. If this raises, nothing was sent."""
        return self.client.begin(to, function, args, kwargs, timeout, rref_access=rref_access)

    def call_async(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        on_done: Callable[[Call], None],
        creation: Creation | None = None,
        rref_access: Access | None = None,
        devices: DevicePairs | None = None,
    ) -> Call:
        """Start a call. When it has ended, `on_done` is called with it on a worker thread; see `result`.

        With a `creation` the result stays on the callee under that name; then `on_done` may run on any thread that
        reads, and must be short. A `rref_access` names the value and the method, if the call accesses a reference.
        """
        return self.client.begin(to, function, args, kwargs, timeout, on_done, creation, rref_access, devices)

    # -- one-way messages --------------------------------------------------------------------------------------

    def handle(self, kind: type, handler: Handler, *, returns: bool = False, urgent: bool = False) -> None:
        """Call `handler` for messages of this kind; see `OneWay.handle`."""
        self.oneway.handle(kind, handler, returns=returns, urgent=urgent)

    def tell(self, to: int, head: Any, data: bytes = b"") -> None:
        """Send a one-way message. It is no error if the worker is gone."""
        self.oneway.tell(to, head, data)

    # -- peers ------------------------------------------------------------------------------------------------

    def on_lost(
        self, callback: Callable[[WorkerRecord, str], None], is_idle: Callable[[], bool] = lambda: False
    ) -> None:
        """Call `callback` with every worker that is lost, and the reason. For `is_idle` see `LostWorkers.observe`."""
        self.peers.lost_workers.observe(lambda peer, channels, reason: callback(peer.record, reason), is_idle)

    @property
    def settings(self) -> AgentSettings:
        """The settings. They may be replaced while the agent runs."""
        return self.local.settings

    @settings.setter
    def settings(self, settings: AgentSettings) -> None:
        self.local.settings = settings

    @property
    def closed(self) -> str:
        """Why the agent cannot be used; empty while it can."""
        return self.local.closed

    def register(self, name: str, function: Callable[..., Any], *, deferred: bool = False) -> None:
        """Let other workers call `function` as ``@name``."""
        self.server.register(name, function, deferred=deferred)

    def gather(
        self, value: object = None, workers: Sequence[str] | None = None, timeout: float = 0, what: str = "all_gather()"
    ) -> dict[str, Any]:
        """Contribute a value and return those of all `workers` (default: all); see `Collectives.gather`."""
        with short_tracebacks():
            return self.collectives.gather(value, workers, timeout=timeout, what=what)

    # -- shutdown ---------------------------------------------------------------------------------------------

    def activity(self) -> list[str]:
        """Describe the calls in flight, made and served."""
        return self.shutdown_protocol.activity()

    def shutdown(self, *, graceful: bool = True, timeout: float = 0.0, strict_references: bool = False) -> None:
        """Leave the group. A graceful shutdown waits until all workers have called it and no call is in flight.

        `timeout` in seconds bounds that wait, 0 does not. When it passes, the agent is closed and the error names the
        workers that were waited for. Safe to call again, and from several threads. References that are still held are
        logged; with `strict_references` they are an error, raised when everything is closed.
        """
        with short_tracebacks():
            self.shutdown_protocol.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)

    def close(self) -> None:
        """Stop at once: send goodbyes, end all waits, and free everything. Safe to call again."""
        self.shutdown_protocol.close()

    def abandon(self) -> None:
        """In the child of a fork: close its copies of the sockets, and touch nothing else."""
        self.local.closed = "this process is a fork of the worker's; a fork cannot use its agent"
        for listener in self.listeners:
            listener.abandon()
        self.pending.abandon()
        self.peers.abandon()
        self.poller.abandon()


def _listen(agent: Agent, transports: Sequence[tuple[Transport, str]]) -> None:
    try:
        for transport, address in transports:
            if address:  # else it only connects
                agent.listeners.append(transport.listen(address))
    except BaseException:
        agent.shutdown_protocol.close_listeners()
        agent.poller.close()
        raise


class _NotAdded:
    """Stands for a part that this agent was made without."""

    def __init__(self, worker: str, part: str) -> None:
        self._worker = worker
        self._part = part

    def __getattr__(self, name: str) -> NoReturn:
        raise NotInitialized(f"worker {self._worker!r} was made without {self._part}: make it with telegrad.init_rpc()")


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _forget_in_children() -> None:
    """Have the children of forks, such as DataLoader workers, neither hold nor use the sockets of agents."""
    for agent in list(_agents):
        agent.abandon()


os.register_at_fork(after_in_child=_forget_in_children)
