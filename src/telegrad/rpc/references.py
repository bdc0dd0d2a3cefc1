"""Keeps the references of one agent: the values that live here, and who may still name them.

`telegrad.protocol.references` has the rules; this carries them out. An RRef that dies, in any thread and at any moment,
only appends to a deque; a thread of its own tells the owner.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.agent.calls import Call
from telegrad.agent.channel import Channel
from telegrad.agent.group import WorkerRecord
from telegrad.agent.keeper import Placed
from telegrad.errors import CallError, DeadlineExceeded, NotInitialized, ReferenceGone, TelegradError, WorkerLost
from telegrad.protocol import references as protocol
from telegrad.protocol.references import LIFE, Id
from telegrad.rpc.futures import Future
from telegrad.rpc.kept import Kept, show
from telegrad.rpc.mailbox import Mailbox, Turn
from telegrad.rpc.options import given_timeout
from telegrad.rpc.rref import RRef, Use
from telegrad.rpc.visits import Visits
from telegrad.waiting import Event
from telegrad.wire.frames import Message
from telegrad.wire.messages import (
    Creation,
    ForkInfo,
    RRefChildAccept,
    RRefForkAccept,
    RRefForkRequest,
    RRefSkip,
    RRefUserDelete,
)

_log = logging.getLogger("telegrad")

_LIFE_MASK = (1 << 23) - 1

Answer = Callable[[object, BaseException | None], None]


class References:
    """What `telegrad.rpc.RRef` acts on: one per agent, made before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._me = agent.me.id
        self._life = agent.me.incarnation & _LIFE_MASK
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # protects _rules, _kept, _uses and _streams
        self._rules = protocol.References(self._me, self._is_gone)
        self._kept: dict[Id, Kept] = {}
        self._uses: dict[Id, Use] = {}
        self._streams: dict[Id, list[int]] = {}  # of ordered objects: stream, next number, handles here
        self._stream_numbers = itertools.count()
        self._closed = False
        self._dropped: deque[tuple[Id, Id | None, bool]] = deque()
        self._wake: Event | None = None
        self._sweeping = False
        self.handles: type[RRef[Any]] = RRef
        """The class of the references that calls make and bring."""
        agent.keeper = self
        agent.references = self
        agent.handle(RRefForkRequest, self._on_request, urgent=True)
        agent.handle(RRefForkAccept, self._on_accept, urgent=True)
        agent.handle(RRefChildAccept, self._on_child_accept, urgent=True)
        agent.handle(RRefUserDelete, self._on_delete, urgent=True)
        agent.on_lost(self._on_lost)
        Visits(self)

    def _is_gone(self, worker: int) -> bool:
        return worker != self._me and bool(self.agent.peers.find(worker).gone)

    def _new_id(self) -> Id:
        return self._me, self._life << LIFE | next(self._numbers)

    # -- making ---------------------------------------------------------------------------------------------------

    def own(self, value: Any, *, ordered: bool = False, cls: type[RRef[Any]] | None = None) -> RRef[Any]:
        """A reference to a value that lives here."""
        self.check_open()
        self._start_sweeping()
        rref = self._new_id()
        kept = Kept(ordered)
        kept.set(value)
        with self._lock:
            self._kept[rref] = kept
            self._rules.own(rref)
        return self._handle(rref, None, self._me, ordered, cls)

    def create(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        *,
        ordered: bool = False,
        keeps: object = None,
    ) -> RRef[Any]:
        """Have a worker run a function and keep the result; a reference to it, at once.

        `keeps` is kept alive until the function has run.
        """
        self._start_sweeping()
        owner = self.agent.peers.find(to).record.id
        rref, fork = self._new_id(), self._new_id()
        use = None if owner == self._me else Use(fork, creator=True)
        with self._lock:
            if use is None:
                self._kept[rref] = Kept(ordered)
                self._rules.own(rref, computing=True)
            else:
                self._uses[fork] = use
                self._rules.creating(rref, fork, owner)
        handle = self._handle(rref, use, owner, ordered)
        creation = Creation(rref, fork, ordered)
        try:
            self.agent.call_async(
                owner,
                function,
                args,
                kwargs,
                timeout=timeout,
                on_done=partial(self._answered, rref, use, keeps),
                creation=creation,
            )
        except BaseException:
            with self._lock:
                self._rules.not_created(fork)
                effects = self._rules.computed(rref)
            self._do(effects)
            raise
        return handle

    def _answered(self, rref: Id, use: Use | None, keeps: object, call: Call) -> None:
        if use is None:
            with self._lock:
                kept = self._kept.get(rref)
            if kept is not None and call.error is not None:
                kept.set(None, call.error)  # unless the function has said so itself
            return
        if isinstance(call.error, CallError):
            use.error = call.error
        # What the function raised is not read here: each use asks the owner, and gets an exception of its own.
        use.creation = call
        if call.answer is not None:
            with self._lock:
                effects = self._rules.answered(use.fork)
            self._do(effects)
        self._settle(use)

    def _handle(
        self, rref: Id, use: Use | None, owner: int, ordered: bool, cls: type[RRef[Any]] | None = None
    ) -> RRef[Any]:
        if ordered:
            with self._lock:
                stream = self._streams.get(rref)
                if stream is None:
                    stream = self._streams[rref] = [next(self._stream_numbers), 0, 0]
                stream[2] += 1
        return (cls or self.handles)._make(self, rref, use, owner, ordered)

    def check_open(self) -> None:
        """Raise an error if the agent has been shut down."""
        if self._closed or self.agent.closed:
            raise NotInitialized(f"worker {self.agent.me.name!r} has been shut down, and its references with it")

    # -- the end of a handle --------------------------------------------------------------------------------------

    def dropped(self, rref: Id, fork: Id | None, ordered: bool) -> None:
        """A handle is gone. Called by destructors: it may append to a deque, and wake a thread, and nothing else."""
        if self._closed:
            return
        self._dropped.append((rref, fork, ordered))
        wake = self._wake
        if wake is not None:
            wake.set()

    def _sweep(self) -> None:
        """Tell owners of the handles that are gone, until the agent closes."""
        while not self._closed:
            wake = self._wake = self.agent.runtime.event()
            if not self._dropped and not self._closed:
                wake.wait(None)  # set by `dropped` and by `close`
            while self._dropped:
                rref, fork, ordered = self._dropped.popleft()
                with self._lock:
                    if ordered:
                        self._leave_stream(rref)
                    if fork is None:
                        effects = self._rules.released(rref)
                    else:
                        effects = self._rules.dropped(fork)
                        self._uses.pop(fork, None)
                self._do(effects)

    def _start_sweeping(self) -> None:
        """Called before there is a handle that could die."""
        if self._sweeping:
            return
        with self._lock:
            begun, self._sweeping = self._sweeping, True
        if not begun:
            self.agent.executor.start_thread("references", self._sweep)

    def _leave_stream(self, rref: Id) -> None:
        stream = self._streams.get(rref)
        if stream is not None:
            stream[2] -= 1
            if not stream[2]:
                del self._streams[rref]

    def close(self) -> None:
        """The agent shuts down: values are let go, and whoever waits for one is told."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, {}
            uses, self._uses = self._uses, {}
        if self._wake is not None:
            self._wake.set()
        gone = NotInitialized(f"worker {self.agent.me.name!r} has been shut down, and its references with it")
        for value in kept.values():
            value.set(None, gone)
        for use in uses.values():
            self._settle(use)

    def held(self) -> list[str]:
        """What is kept here for others, and what of others is held here, for people."""
        with self._lock:
            owned, held = self._rules.owned(), dict(self._rules.held())
            values = {rref: kept.value if kept.ready else None for rref, kept in self._kept.items()}
        lines = []
        for rref, users in owned.items():
            if users:
                names = ", ".join(repr(self.agent.peers.find(user).record.name) for user in users)
                lines.append(f"{show(rref)}, a {type(values.get(rref)).__name__}, is held by worker {names}")
        lines += [f"{show(rref)} is held here" for rref in held.values()]
        return lines

    def counts(self) -> dict[str, int]:
        """How many values are kept here, and how many references to values elsewhere are held."""
        with self._lock:
            owned = self._rules.owned()
            return {
                "values": len(self._kept),
                "forks": len(self._rules.held()),
                "owned": len(owned),
                "shared": sum(bool(users) for users in owned.values()),
                "forks elsewhere": self._rules.fork_count(),
                "unsettled": sum(not use.settled for use in self._uses.values()),
            }

    def release_all(self) -> None:
        """Give up all references to values elsewhere, whoever holds them here: for the end of a group."""
        with self._lock:
            effects = [effect for fork in self._rules.held() for effect in self._rules.dropped(fork)]
            uses, self._uses = self._uses, {}
        for use in uses.values():
            use.given_up = True
            self._settle(use)
        self._do(effects)

    # -- values -----------------------------------------------------------------------------------------------------

    def value(self, rref: Id, deadline: float | None) -> Any:
        """A value that lives here; waits for it if it is still being made."""
        kept = self.find(rref)
        if not kept.ready:
            event = self.agent.runtime.event()
            if not kept.when_ready(event.set) and not self.agent.executor.wait(event, deadline):
                raise DeadlineExceeded(
                    f"{show(rref)} on worker {self.agent.me.name!r} is still being made", worker=self.agent.me.name
                )
        return kept.get()

    def find(self, rref: Id) -> Kept:
        """A value that lives here, or is being made, or is to come."""
        self.check_open()
        with self._lock:
            kept = self._kept.get(rref)
        if kept is None:
            raise ReferenceGone(
                f"{show(rref)} names nothing on worker {self.agent.me.name!r} (any more): it was released, or the "
                "workers that held it are lost"
            )
        return kept

    def find_for(self, caller: int, rref: Id, unconfirmed: bool) -> Kept:
        """The same; but its creator may use a reference before the call that makes the value has come."""
        if unconfirmed and rref[0] == caller:
            with self._lock:
                return self._kept.setdefault(rref, Kept())
        return self.find(rref)

    def run_backward(self, rref: Id, context: int, retain_graph: bool) -> None:
        """Run a pass from a value that lives here: a distributed one, or, with the context -1, a local one."""
        value = self.value(rref, None)
        if not isinstance(value, torch.Tensor):
            raise TelegradError(
                f"RRef should contain a tensor for .backward(), and {show(rref)} on worker {self.agent.me.name!r} is a "
                f"{type(value).__name__}"
            )
        if context == -1:
            torch.autograd.backward([value], retain_graph=retain_graph)
        else:
            self.agent.autograd.backward(context, [value], retain_graph)

    # -- as the agent's keeper --------------------------------------------------------------------------------------

    def outgoing(self, to: int, references: Sequence[Placed]) -> tuple[ForkInfo, ...]:
        forks = []
        with self._lock:
            for position, handle in references:
                assert isinstance(handle, RRef)
                use = handle._use
                fork = self._rules.pass_on(handle._id, use.fork if use else None, to=to, fork=self._new_id())
                forks.append(ForkInfo(position, fork.rref, fork.fork, fork.owner, handle._ordered))
        return tuple(forks)

    def not_sent(self, to: int, forks: Sequence[ForkInfo]) -> None:
        for info in forks:
            with self._lock:
                effects = self._rules.not_sent(protocol.Fork(info.rref, info.fork, info.owner), to)
            self._do(effects)

    def incoming(self, sender: int, forks: Sequence[ForkInfo]) -> list[Placed]:
        placed: list[Placed] = []
        self._start_sweeping()
        for info in forks:
            use = None if info.owner == self._me else Use(info.fork)
            with self._lock:
                if use is None:
                    self._kept.setdefault(info.rref, Kept())
                else:
                    self._uses[info.fork] = use
                effects = self._rules.received(sender, protocol.Fork(info.rref, info.fork, info.owner))
                if use is not None:
                    use.confirmed = use.settled = sender == info.owner
            placed.append((info.position, self._handle(info.rref, use, info.owner, info.ordered)))
            self._do(effects)
        return placed

    def when_confirmed(self, references: Sequence[Placed], action: Callable[[], None]) -> bool:
        uses = [handle._use for _, handle in references if isinstance(handle, RRef) and handle._use is not None]
        with self._lock:
            open_uses = [use for use in uses if not use.settled]
            left = len(open_uses)

            def settled() -> None:
                nonlocal left
                with self._lock:
                    left -= 1
                    last = left == 0
                if last:
                    action()

            for use in open_uses:
                use.waiters.append(settled)
        return not open_uses

    def creating(self, creation: Creation, caller: int) -> None:
        if caller == self._me:
            return  # it is here since the call was made
        with self._lock:
            kept = self._kept.setdefault(creation.rref, Kept())
            if creation.ordered and kept.mailbox is None:
                kept.mailbox = Mailbox()
            self._rules.created(creation.rref, creation.fork, caller)

    def computed(self, creation: Creation, value: object, error: BaseException | None) -> None:
        with self._lock:
            kept = self._kept.get(creation.rref)
        if kept is not None:
            kept.set(value, error)
        with self._lock:
            effects = self._rules.computed(creation.rref)
        self._do(effects)

    # -- effects ----------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[protocol.Effect]) -> None:
        for effect in effects:
            match effect:
                case protocol.RequestFork(to, rref, fork):
                    self.agent.tell(to, RRefForkRequest(rref, fork))
                case protocol.AcceptFork(to, fork, refused):
                    self.agent.tell(to, RRefForkAccept(fork, refused))
                case protocol.AcceptChild(to, fork):
                    self.agent.tell(to, RRefChildAccept(fork))
                case protocol.Delete(to, rref, fork):
                    self.agent.tell(to, RRefUserDelete(rref, fork))
                case protocol.Freed(rref):
                    with self._lock:
                        kept = self._kept.pop(rref, None)
                    del kept  # not under the lock: it may be the user's, with a destructor
                case protocol.Orphaned(rref):
                    self._orphan(rref)
                case protocol.Confirmed(fork) | protocol.Refused(fork):
                    self._confirm(fork, effect)

    def _orphan(self, rref: Id) -> None:
        with self._lock:
            kept = self._kept.get(rref)
        if kept is not None:
            text = f"{show(rref)}: its value will never come, because the worker that was to have it made is lost"
            kept.set(None, ReferenceGone(text))

    def _confirm(self, fork: Id, effect: protocol.Effect) -> None:
        with self._lock:
            use = self._uses.get(fork)
        if use is None:
            return
        if isinstance(effect, protocol.Confirmed):
            use.confirmed = True
        elif effect.owner_lost:  # type: ignore[union-attr]  # it is a Refused
            use.lost = True
        else:
            use.given_up = True
        self._settle(use)

    def _settle(self, use: Use) -> None:
        with self._lock:
            use.settled = True
            waiters, use.waiters = use.waiters, []
        for waiter in waiters:
            waiter()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _sender(self, channel: Channel) -> int:
        return self.agent.peers.find(channel.peer).record.id

    def _on_request(self, channel: Channel, head: RRefForkRequest, message: Message) -> None:
        with self._lock:
            effects = self._rules.requested(self._sender(channel), head.rref, head.fork)
            if head.rref in self._rules.owned():
                self._kept.setdefault(head.rref, Kept())
        self._do(effects)

    def _on_accept(self, channel: Channel, head: RRefForkAccept, message: Message) -> None:
        with self._lock:
            effects = self._rules.accepted(head.fork, refused=head.refused)
        self._do(effects)

    def _on_child_accept(self, channel: Channel, head: RRefChildAccept, message: Message) -> None:
        with self._lock:
            effects = self._rules.child_accepted(head.fork)
        self._do(effects)

    def _on_delete(self, channel: Channel, head: RRefUserDelete, message: Message) -> None:
        with self._lock:
            effects = self._rules.deleted(self._sender(channel), head.rref, head.fork)
        self._do(effects)

    def _on_lost(self, record: WorkerRecord, reason: str) -> None:
        life = record.incarnation & _LIFE_MASK
        with self._lock:
            effects = self._rules.lost(record.id, life)
            known = self._rules.owned()
            expected = [
                rref for rref in self._kept if rref not in known and rref[0] == record.id and rref[1] >> LIFE == life
            ]
            mailboxes = [kept.mailbox for kept in self._kept.values() if kept.mailbox is not None]
        for mailbox in mailboxes:
            mailbox.lost(record.id)
        self._do(effects)
        for rref in expected:
            self._orphan(rref)
            with self._lock:
                self._kept.pop(rref, None)

    # -- turns of ordered objects --------------------------------------------------------------------------------------

    def next_turn(self, rref: Id) -> Turn:
        """The turn of the next call of an ordered object that this worker makes."""
        with self._lock:
            stream = self._streams[rref]
            stream[1] += 1
            return stream[0], stream[1] - 1

    def skip_turn(self, owner: int, rref: Id, unconfirmed: bool, turn: Turn) -> None:
        """A call with this turn was never sent."""
        self.agent.tell(owner, RRefSkip(rref, unconfirmed, turn))

    def wait_for(self, use: Use, handle: RRef[Any], timeout: float) -> None:
        """Wait until the owner knows of a reference, or never will."""
        event = self.agent.runtime.event()
        with self._lock:
            if use.settled:
                return
            use.waiters.append(event.set)
        seconds = given_timeout(timeout)
        seconds = self.agent.settings.rpc_timeout if seconds is None else seconds
        deadline = self.agent.runtime.now() + seconds if seconds else None
        if not self.agent.executor.wait(event, deadline):
            raise DeadlineExceeded(
                f"{handle!r} was not confirmed by its owner within {seconds:g} s",
                worker=handle.owner_name(),
                elapsed=seconds,
            )

    def future_of(self, handle: RRef[Any]) -> Future[Any]:
        """A future that is done when the value has been made."""
        future: Future[Any] = Future(self.agent)
        use = handle._use

        def done() -> None:
            try:
                if use is not None and use.creation is not None:
                    self.agent.result(use.creation)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(None)

        with self._lock:
            waits = use is not None and not use.settled
            if waits and use is not None:
                use.waiters.append(done)
        if not waits:
            done()
        return future

    def owner_lost(self, rref: Id, owner: int) -> WorkerLost:
        """The error of a reference whose owner is lost."""
        peer = self.agent.peers.find(owner)
        name = peer.record.name
        return WorkerLost(f"{show(rref)} is gone: worker {name!r}, its owner, is lost ({peer.gone})", worker=name)
