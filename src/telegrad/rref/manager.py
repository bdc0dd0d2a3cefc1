"""What `telegrad.rpc.RRef` acts on: it makes references, finds the values that live here, and waits for others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call, current_served
from telegrad.connection.channel import Channel
from telegrad.errors import CallError, DeadlineExceeded, NotInitialized, TelegradError, WorkerLost
from telegrad.execution.executor import Owed
from telegrad.futures import Future
from telegrad.options import given_timeout
from telegrad.protocol.ownership import Id, Ref
from telegrad.rref.context import RRefContext
from telegrad.rref.extension import RRefExtension
from telegrad.rref.finalizer import Finalizer
from telegrad.rref.handle import RRef, UserRRef
from telegrad.rref.owner import OwnerValue, show
from telegrad.rref.service import RRefService
from telegrad.rref.turns import Streams
from telegrad.wire.frames import Message
from telegrad.wire.messages import Creation, RRefAccess, RRefSkip, StreamPosition

Dropped = tuple[Ref, Id | None, int, bool]
"""What a dead handle leaves behind: reference, fork, owner, and whether it was ordered."""


class RRefManager:
    """The references of one agent; made before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.handles: type[RRef[Any]] = RRef
        """The class of the references that calls make and bring."""
        self._ledger = RRefContext(agent)
        self._me = self._ledger.me
        self._streams = Streams(self._ledger.life)
        self._sweeper: Finalizer[Dropped] = Finalizer(agent.runtime, agent.executor, self._sweep)
        self._passing = RRefExtension(self._ledger, self)
        self.closed = False
        agent.keeper = self._passing
        agent.references = self
        agent.handle(RRefSkip, self._on_skip, urgent=True)
        RRefService(self)

    # -- making ---------------------------------------------------------------------------------------------------

    def own(self, value: Any, *, ordered: bool = False, cls: type[RRef[Any]] | None = None) -> RRef[Any]:
        """A reference to a value that lives here."""
        self.check_open()
        kept = OwnerValue(ordered)
        kept.set(value)
        with self._ledger.lock:
            rref, _ = self._ledger.new_rref(self.agent.me)
            self._ledger.kept[rref] = kept
            self._ledger.rules.own(rref)
        return self.make_handle(rref, None, self._me, ordered, cls)

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
        visit: RRefAccess | None = None,
    ) -> RRef[Any]:
        """Have a worker run a function and keep the result; a reference to it, at once.

        `keeps` is kept alive until the function has run.
        """
        self.check_open()
        ledger = self._ledger
        record = self.agent.peers.find(to).record
        owner = record.id
        with ledger.lock:
            (rref, after), fork = ledger.new_rref(record), ledger.new_fork()
            use = None if owner == self._me else UserRRef(fork, creator=True)
            if use is None:
                ledger.kept[rref] = OwnerValue(ordered)
                ledger.rules.own(rref, computing=True)
            else:
                ledger.uses[fork] = use
                ledger.rules.creating(rref, fork, owner)
        handle = self.make_handle(rref, use, owner, ordered)
        try:
            self.agent.call_async(
                owner,
                function,
                args,
                kwargs,
                timeout=timeout,
                on_done=partial(self._answered, rref, use, keeps),
                creation=Creation(rref, fork, ordered, after),
                visit=visit,
            )
        except BaseException:
            with ledger.lock:
                ledger.rules.not_created(fork)
                effects = ledger.rules.computed(rref)
            ledger.carry_out(effects)
            raise
        return handle

    def _answered(self, rref: Ref, use: UserRRef | None, keeps: object, call: Call) -> None:
        """The call that makes a value has ended. Runs on whatever thread read that, so it waits for nothing."""
        ledger = self._ledger
        if use is None:
            with ledger.lock:
                kept = ledger.kept.get(rref)
            if kept is not None and call.error is not None:  # unless the function has said so itself
                kept.set(None, call.error, call.error if isinstance(call.error, CallError) else None)
            return
        if isinstance(call.error, CallError):
            use.error = call.error
        # What the function raised is not read here: each use asks the owner, and gets an exception of its own.
        use.creation = call
        if call.answer is not None:
            with ledger.lock:
                effects = ledger.rules.answered(use.fork)
            ledger.carry_out(effects)
        ledger.settle(use)

    def make_handle(
        self, rref: Ref, use: UserRRef | None, owner: int, ordered: bool, cls: type[RRef[Any]] | None = None
    ) -> RRef[Any]:
        """A handle of a reference, which is given up when it dies."""
        self._sweeper.start()
        if ordered:
            self._streams.opened(owner, rref)
        return (cls or self.handles)._make(self, rref, use, owner, ordered)

    def creation_error(self, handle: RRef[Any]) -> CallError | None:
        """Why the call that was to make the value was not answered, as far as this worker knows."""
        if handle._use is not None:
            return handle._use.error
        kept = self._ledger.kept.get(handle._id)
        return kept.call_error if kept is not None else None

    # -- the end ----------------------------------------------------------------------------------------------------

    def dropped(self, rref: Ref, fork: Id | None, owner: int, ordered: bool) -> None:
        """A handle is gone. Called by destructors: no lock may be taken here."""
        self._sweeper.dropped((rref, fork, owner, ordered))

    def _sweep(self, dropped: Dropped) -> None:
        rref, fork, owner, ordered = dropped
        if ordered:
            end = self._streams.closed(owner, rref)
            if end is not None:
                self.agent.tell(owner, RRefSkip(end, last=True))
        ledger = self._ledger
        with ledger.lock:
            if fork is None:
                effects = ledger.rules.released(rref)
            else:
                effects = ledger.rules.dropped(fork)
                ledger.uses.pop(fork, None)
        ledger.carry_out(effects)

    def settled(self) -> bool:
        """Whether every handle that died has been given up."""
        return self._sweeper.idle()

    def check_open(self) -> None:
        """Raise an error if the agent has been shut down."""
        if self.closed or self.agent.closed:
            raise NotInitialized(
                f"worker {self.agent.me.name!r} cannot use references: {self.agent.closed or 'it is being shut down'}"
            )

    def close(self) -> None:
        """The agent shuts down: values are let go, and whoever waits for one is told."""
        ledger = self._ledger
        with ledger.lock:
            self.closed = True
            kept, ledger.kept = ledger.kept, {}
            uses, ledger.uses = ledger.uses, {}
        self._sweeper.close()
        gone = NotInitialized(f"worker {self.agent.me.name!r} has been shut down, and its references with it")
        for value in kept.values():
            value.set(None, gone)
        for use in uses.values():
            ledger.settle(use)

    # -- for people and tests ---------------------------------------------------------------------------------------

    def held(self) -> list[str]:
        """What is kept here for others, and what of others is held here, for people."""
        ledger = self._ledger
        with ledger.lock:
            owned, held = ledger.rules.owned(), list(ledger.rules.held().values())
            kinds = {
                rref: "a value that is being made"
                if not kept.ready
                else f"what ended in {type(kept.error).__name__}"
                if kept.error is not None
                else f"a {type(kept.value).__name__}"
                for rref, kept in ledger.kept.items()
            }
        lines = []
        for rref, users in owned.items():
            if users:
                names = " and ".join(repr(ledger.name_of(user)) for user in users)
                lines.append(f"{show(rref)}, {kinds.get(rref, 'a value')} of this worker, is held by {names}")
        lines += [f"{show(rref)} of worker {ledger.name_of(owner)!r} is held here" for rref, owner in held]
        return lines

    def counts(self) -> dict[str, int]:
        """How many values are kept here, and how many references to values elsewhere are held."""
        ledger = self._ledger
        with ledger.lock:
            owned = ledger.rules.owned()
            return {
                "values": len(ledger.kept),
                "owned": len(owned),
                "shared": sum(bool(users) for users in owned.values()),
                "forks elsewhere": ledger.rules.fork_count(),
                "forks": len(ledger.rules.held()),
                "uses": len(ledger.uses),
                "unsettled": sum(not use.settled for use in ledger.uses.values()),
                "streams": self._streams.count(),
            }

    def release_all(self) -> None:
        """Give up all references to values elsewhere, whoever holds them here: for the end of a group."""
        ledger = self._ledger
        with ledger.lock:
            effects = [effect for fork in ledger.rules.held() for effect in ledger.rules.dropped(fork)]
            uses, ledger.uses = ledger.uses, {}
        for use in uses.values():
            use.given_up = True
            ledger.settle(use)
        ledger.carry_out(effects)

    # -- values -----------------------------------------------------------------------------------------------------

    def deadline(self, timeout: float) -> float | None:
        """When a wait with this timeout ends: never later than the call that is served meanwhile."""
        seconds = given_timeout(timeout)
        seconds = self.agent.settings.rpc_timeout if seconds is None else seconds
        deadline = self.agent.runtime.now() + seconds if seconds else None
        served = current_served.get()
        if served is not None and served.deadline is not None:
            deadline = served.deadline if deadline is None else min(deadline, served.deadline)
        return deadline

    def value(self, rref: Ref, deadline: float | None) -> Any:
        """A value that lives here; waits for it if it is still being made."""
        self.check_open()
        return self._value_of(self._ledger.find(rref), rref, deadline)

    def _value_of(self, kept: OwnerValue, rref: Ref, deadline: float | None) -> Any:
        if not kept.ready:
            event = self.agent.runtime.event()
            if not kept.when_ready(event.set) and not self.agent.executor.wait(event, deadline):
                raise DeadlineExceeded(
                    f"{show(rref)} on worker {self.agent.me.name!r} is still being made", worker=self.agent.me.name
                )
        return kept.get()

    def find_for(self, caller: int, rref: Ref) -> OwnerValue:
        """A value that another worker names. Its creator may do so before the call that makes it has come."""
        return self._ledger.find_for(caller, rref)

    def run_backward(self, caller: int, rref: Ref, context: int, retain_graph: bool) -> None:
        """Run a pass from a value that lives here: a distributed one, or, with the context -1, a local one."""
        self.check_open()
        value = self._value_of(self.find_for(caller, rref), rref, None)
        if not isinstance(value, torch.Tensor):
            raise TelegradError(
                f"RRef should contain a tensor for .backward(), and {show(rref)} on worker {self.agent.me.name!r} is a "
                f"{type(value).__name__}"
            )
        if context == -1:
            torch.autograd.backward([value], retain_graph=retain_graph)
        else:
            self.agent.autograd.backward(context, [value], retain_graph)

    # -- turns of ordered objects -------------------------------------------------------------------------------------

    def next_turn(self, owner: int, rref: Ref) -> StreamPosition:
        """The turn of the next call of an ordered object that this worker makes."""
        return self._streams.next_turn(owner, rref)

    def skip_turn(self, owner: int, turn: StreamPosition) -> None:
        """A call with this turn was never sent."""
        self.agent.tell(owner, RRefSkip(turn))

    def _on_skip(self, channel: Channel, head: RRefSkip, message: Message) -> None:
        self._passing.skip(channel.worker.id, head.stream_position, last=head.last)

    # -- waiting for owners -------------------------------------------------------------------------------------------

    def wait_for(self, use: UserRRef, handle: RRef[Any], timeout: float) -> None:
        """Wait until the owner knows of a reference, or never will."""
        event = self.agent.runtime.event()
        if self._ledger.when_settled([use], event.set):
            return
        started = self.agent.runtime.now()
        if not self.agent.executor.wait(event, self.deadline(timeout)):
            elapsed = self.agent.runtime.now() - started
            raise DeadlineExceeded(
                f"{handle!r} was not confirmed by its owner within {elapsed:.3g} s",
                worker=handle.owner_name(),
                elapsed=elapsed,
            )

    def future_of(self, handle: RRef[Any]) -> Future[Any]:
        """A future that is done when the value has been made."""
        self.check_open()
        future: Future[Any] = Future(self.agent)
        use = handle._use

        def end(error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None)

        if use is None:
            kept = self._ledger.find(handle._id)
            if kept.when_ready(lambda: end(kept.error)):
                end(kept.error)
            return future

        def settled() -> None:
            try:
                handle._usable(use)
                end(self.agent.client.failure(use.creation) if use.creation is not None else None)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                end(error.with_traceback(None))

        # Who settles may be a thread that reads a link, and what follows from a future is the user's.
        if self._ledger.when_settled([use], lambda: self.agent.executor.submit(Owed(settled))):
            settled()
        return future

    def name_of(self, worker: int) -> str:
        """A worker's name, as far as it is known."""
        return self._ledger.name_of(worker)

    def owner_lost(self, rref: Ref, owner: int) -> WorkerLost:
        """The error of a reference whose owner is lost."""
        name = self.name_of(owner)
        return WorkerLost(f"{show(rref)} is gone: worker {name!r}, its owner, is lost", worker=name)
