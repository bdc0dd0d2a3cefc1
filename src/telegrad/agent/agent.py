"""One worker, as an object: it calls others, serves them, and knows when they are gone.

Nothing here is global, so several agents can live in one process. `telegrad.rpc` keeps one as the default.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from telegrad.agent.shutdown import Shutdown
from telegrad.calls import undelivered
from telegrad.calls.call import Call, Served
from telegrad.calls.client import Client
from telegrad.calls.collectives import SERVICE, Collectives
from telegrad.calls.exit_cause import shortened
from telegrad.calls.keeper import Keeper
from telegrad.calls.oneway import Handler, MakeHead, OneWay
from telegrad.calls.recorder import Recorder
from telegrad.calls.server import Server
from telegrad.connection.accept import PendingConnections
from telegrad.connection.channel import Channel
from telegrad.connection.peers import Peer, Peers
from telegrad.connection.worker_record import WorkerRecord, check_id, check_name
from telegrad.errors import (
    AuthenticationError,
    ProtocolError,
    WorkerLost,
)
from telegrad.execution.event_loop import EventLoop
from telegrad.execution.executor import Executor
from telegrad.settings import AgentSettings
from telegrad.transport.base import Listener, Poller, Transport
from telegrad.transport.buffers import BufferPool
from telegrad.transport.slabs import SlabPool
from telegrad.waiting import Runtime
from telegrad.wire.frames import Frame, Message
from telegrad.wire.messages import RESPONSES, Cancel, Creation, Reply, Request, RRefAccess, decode_head

_log = logging.getLogger("telegrad")

_DYING = 1.0  # seconds in which a killed process is gone for good


class Agent:
    """One worker of a group.

    It listens from the start, and serves once `start` has told it who the others are.
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
        settings: AgentSettings | None = None,
    ) -> None:
        check_name(name)
        check_id(worker_id)
        self.settings = settings or AgentSettings()
        self.limits = self.settings.limits
        self.runtime = runtime
        self.poller = poller
        self.token = token
        self.buffers = BufferPool()
        self.slabs = SlabPool(self.settings.shared_memory, self.buffers.trim)
        self.executor = Executor(runtime, poller, self._poll, name=name, most_running=self.settings.running)
        self.peers = Peers(self, [transport for transport, _ in transports])
        self.pending = PendingConnections(self, self.peers)
        self.client = Client(self)
        self.server = Server(self, EventLoop(runtime, self.executor))
        self.collectives = Collectives(self)
        self.oneway = OneWay(self)
        self.register(SERVICE[1:], self.collectives.arrive, deferred=True)
        self.recorder: Recorder | None = None
        self.keeper: Keeper | None = None
        self.autograd: Any = None
        """What `telegrad.autograd` put on top of this agent."""
        self.references: Any = None
        """What `telegrad.rpc` keeps the references of this agent in."""
        self.listeners: list[Listener] = []
        self.carries_autocast = True
        """Whether calls and passes carry the autocast of their caller."""
        self.closed = ""
        """Why the agent cannot be used; empty while it can."""
        self.draining = False
        """Whether a shutdown waits for calls to end; their ends are then reported with `activity_ended`."""
        self.shutdown_protocol = Shutdown(self)
        self._on_lost: list[Callable[[WorkerRecord, str], None]] = []
        try:
            for transport, address in transports:
                self.listeners.append(transport.listen(address))
        except BaseException:
            self.shutdown_protocol.close_listeners()
            poller.close()
            raise
        self.me = WorkerRecord(
            name=name,
            id=worker_id,
            incarnation=runtime.random_bits(63) if incarnation is None else incarnation,
            addresses=tuple(listener.address for listener in self.listeners),
            host=host,
            main=main,
        )
        _forget_in_children(self)

    def start(self, group: Iterable[WorkerRecord]) -> None:
        """Begin to serve, in a group of these workers (this one among them)."""
        self.peers.set_group(group)
        for listener in self.listeners:
            self.pending.watch(listener)
        self.executor.start()

    # -- calling ----------------------------------------------------------------------------------------------

    def call(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Run a function on a worker and return what it returns.

        `function` may be the name of a registered one, with an ``@`` before it. `timeout` is in seconds, 0 for none;
        the default is that of the settings. A call made while serving another never outlives that one's deadline.
        """
        return self.client.call(to, function, args, kwargs, timeout)

    def begin(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        visit: RRefAccess | None = None,
    ) -> Call:
        """Start a call that the caller will `wait` for, and then read with `result`. If it raises, nothing was sent."""
        return self.client.begin(to, function, args, kwargs, timeout, visit=visit)

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
        visit: RRefAccess | None = None,
    ) -> Call:
        """Start a call. `on_done` is run with it, on a thread of the agent, when it has ended; see `result`.

        With a `creation` the result stays with the callee, under that name; then `on_done` may run on any thread that
        reads, and must be short. A `visit` names the value and the method, if it is a call of one.
        """
        return self.client.begin(to, function, args, kwargs, timeout, on_done, creation, visit)

    def wait(self, call: Call, deadline: float | None = None) -> bool:
        """Wait until `call` has ended; False if `deadline`, of this wait only, passes first."""
        return self.client.wait(call, deadline)

    def result(self, call: Call) -> Any:
        """What the call returned; raises what it raised. The call has ended."""
        return self.client.result(call)

    def cancel(self, call: Call, reason: str = "the caller cancelled it") -> bool:
        """End a call and tell the callee; False if it has ended already."""
        return self.client.cancel(call, reason)

    # -- messages that are no calls of functions ---------------------------------------------------------------

    def handle(self, kind: type, handler: Handler, *, returns: bool = False, urgent: bool = False) -> None:
        """Have `handler` run for messages of this kind that others send; see `OneWay.handle`."""
        self.oneway.handle(kind, handler, returns=returns, urgent=urgent)

    def send(self, to: int, make_head: MakeHead, attachments: Sequence[Any], data: bytes = b"") -> None:
        """Send a message that is no call: no credits, no deadline, no answer but what its receiver sends by itself."""
        self.oneway.send(to, make_head, attachments, data)

    def tell(self, to: int, head: Any, data: bytes = b"") -> None:
        """The same, for what a worker that is gone need not know: that is no error."""
        self.oneway.tell(to, head, data)

    # -- messages ---------------------------------------------------------------------------------------------

    def _poll(self, deadline: float | None) -> None:
        for item, ready in self.poller.wait(deadline):
            if item.owner is not None:
                try:
                    item.owner.on_ready(ready)
                except Exception:  # noqa: BLE001 - a fault of ours, which must not cost the others what came for them
                    _log.exception("worker %r: what came was not taken", self.me.name)
                    self.executor.pause()

    def deliver(self, channel: Channel, message: Message) -> None:
        """Take a message that arrived on a channel."""
        head = decode_head(message.head)
        if channel.outgoing:
            if isinstance(head, RESPONSES):
                call = channel.calls.get(head.call)
                if isinstance(head, Reply) and head.references and self.keeper is not None:
                    # Also where nobody wants the answer any more: its sender must hear that they have been dropped.
                    references = self.keeper.incoming(channel.worker.id, head.references)
                    if call is not None:
                        call.references = references
                if call is None or not self.client.finish(call, head, message):  # it was given up, just now perhaps
                    with channel.lock:
                        charge = channel.abandoned.pop(head.call, 0)
                    if charge:
                        channel.return_credit(charge)
                return
        elif isinstance(head, Request):
            if not head.nested:
                with channel.lock:
                    channel.credits.arrived(message.size)
            self.server.take(channel, head, message)
            return
        elif isinstance(head, Cancel):
            self._cancel_served(self.server.cancel(channel, head.call, head.reason))
            return
        if self.oneway.deliver(channel, head, message):
            return
        raise ProtocolError(f"worker {channel.peer!r} sent a {type(head).__name__} in the wrong direction")

    def undelivered(self, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
        """A message came that this worker cannot take; False: nobody can be told."""
        return undelivered.report(self, channel, frame, message, cause)

    def _cancel_served(self, cancelled: Iterable[Served]) -> None:
        for served in cancelled:
            for call in list(served.children.values()):
                self.cancel(call, f"{served.function}, which made it, was given up: {served.cancelled}")

    # -- peers ------------------------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[WorkerRecord, str], None]) -> None:
        """Have `callback` called with every worker that is lost, and why."""
        self._on_lost.append(callback)

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """A session ended."""
        peer = self.peers.of(channel)
        if peer is not None:
            self.peer_lost(peer, reason)
        else:
            channel.close(reason)

    def channel_left(self, channel: Channel, cause: str) -> None:
        """A worker said goodbye; `cause` says which error ended it, if one did."""
        if cause:
            cause = shortened(cause)
            self.shutdown_protocol.heard(channel.peer, cause)
        peer = self.peers.of(channel)
        # On the channel on which it called us, a goodbye says nothing of the answers that it still owes: they come,
        # if they come, on the other one, before the goodbye there.
        if peer is not None and (channel.outgoing or peer.outgoing is None):
            self.peer_lost(peer, f"it ended {cause}" if cause else "it has shut down", left=True)

    def peer_lost(self, peer: Peer, reason: str, *, left: bool = False) -> None:
        """A worker is gone: nothing that needs it may wait any longer."""
        with peer.lock:
            if peer.gone:
                return
            peer.gone, peer.left = reason, left
            if not left:  # a process that is killed may lose its connections before the socket that it listens at
                peer.dying_until = self.runtime.now() + _DYING
            channels = peer.channels()
            if peer.opening is not None:
                peer.opening.set()
        name = peer.record.name
        # Whoever is leaving may find others gone before it: that is how a group ends.
        if not left and not self.closed and not self.shutdown_protocol.begun:
            _log.warning("worker %r lost worker %r: %s", self.me.name, name, reason)
        for channel in channels:
            channel.close(reason)
            for call in list(channel.calls.values()):
                elapsed = self.runtime.now() - call.started
                error = WorkerLost(
                    f"worker {name!r} is lost ({reason}) while it had {call.function or 'a function'} to run, "
                    f"after {elapsed:.3g} s; the call may or may not have run",
                    worker=name,
                    function=call.function,
                    call=call.id,
                    elapsed=elapsed,
                )
                self.client.finish(call, error=error)
            self._cancel_served(self.server.cancel_all(channel, f"worker {name!r}, which called it, is gone"))
        if not left and not self.peers.remove_traces(peer.record):
            self.executor.at(peer.dying_until, lambda: self.peers.remove_traces(peer.record))
        self.collectives.peer_gone(peer)
        for callback in self._on_lost:
            callback(peer.record, reason)

    def reconnect(self, channel: Channel) -> None:
        """Open a new link for a channel, on a runner."""

        def attempt() -> None:
            peer = self.peers.of(channel)
            if peer is None or peer.gone or self.closed:
                return
            try:
                self.peers.connect(channel, peer)
            except (AuthenticationError, WorkerLost, ProtocolError) as error:
                self.peer_lost(peer, str(error))
            except Exception as error:  # noqa: BLE001 - a shortage or a fault of ours: the session tries again
                _log.warning("worker %r cannot reconnect to worker %r: %s", self.me.name, channel.peer, error)
                channel.connect_failed(str(error), refused=False)

        self.executor.submit(attempt, urgent=True)

    # -- services ---------------------------------------------------------------------------------------------

    def register(self, name: str, function: Callable[..., Any], *, deferred: bool = False) -> None:
        """Let others call `function` as ``@name``."""
        self.server.register(name, function, deferred=deferred)

    def gather(
        self, value: object = None, workers: Sequence[str] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Bring a value and get the values of all `workers`, who must all call this; None: of everybody."""
        timeout = self.settings.rpc_timeout if timeout is None else timeout
        return self.collectives.gather(value, workers, timeout=timeout)

    # -- the end ----------------------------------------------------------------------------------------------

    def activity(self) -> list[str]:
        """What is under way: calls made and calls served, for people."""
        return self.shutdown_protocol.activity()

    def calls_made(self) -> int:
        """How many calls this worker ever made, but for gatherings."""
        return self.client.made

    def as_agent(self) -> Agent:
        """This agent; what runs in it finds it so."""
        return self

    def activity_ended(self) -> None:
        """Wake a shutdown that waits for quiet."""
        self.shutdown_protocol.activity_ended()

    def shutdown(self, *, graceful: bool = True, timeout: float = 0.0, strict_references: bool = False) -> None:
        """Leave. A graceful leave waits until every worker has called shutdown and no call is under way anywhere.

        `timeout` in seconds bounds that wait, 0 does not; at its end the agent is closed all the same, and the error
        says who was waited for. Safe to call again, and from several threads. References that are held at the end of a
        graceful leave are logged; with `strict_references` they are an error, which is raised when all is closed.
        """
        self.shutdown_protocol.shutdown(graceful=graceful, timeout=timeout, strict_references=strict_references)

    def close(self) -> None:
        """Stop at once: say goodbye, end what waits here, and free everything. Safe to call again."""
        self.shutdown_protocol.close()

    def abandon(self) -> None:
        """This is the child of a fork: close its copies of our sockets, and touch nothing else."""
        self.closed = "this process is a fork of the worker's; a fork cannot use its agent"
        for listener in self.listeners:
            listener.abandon()
        self.pending.abandon()
        self.peers.abandon()
        self.poller.abandon()


def _forget_in_children(agent: Agent) -> None:
    """Children of a fork (a DataLoader's) must neither hold nor use the agent's sockets."""
    reference = weakref.ref(agent)

    def in_child() -> None:
        forgotten = reference()
        if forgotten is not None:
            forgotten.abandon()

    os.register_at_fork(after_in_child=in_child)
