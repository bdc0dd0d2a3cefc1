"""References on their way: what happens to the books when calls and answers carry them to other workers, and here.

This is what the agent asks as its `telegrad.calls.keeper.Keeper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from telegrad.calls.keeper import Placed, Traffic
from telegrad.errors import ReferenceGone
from telegrad.protocol import ownership as protocol
from telegrad.protocol.ownership import Ref
from telegrad.rref.context import RRefContext
from telegrad.rref.handle import RRef, UserRRef
from telegrad.rref.ordered import OrderedQueue
from telegrad.rref.owner import OwnerValue, to_keep
from telegrad.wire.messages import Creation, ForkInfo, StreamPosition
from telegrad.wire.reference import Reference


class Book(Protocol):
    """What makes the handles."""

    def make_handle(self, rref: Ref, use: UserRRef | None, owner: int, ordered: bool) -> Reference:
        """A handle of a reference."""

    def settled(self) -> bool:
        """Whether every handle that died has been given up."""

    def held(self) -> list[str]:
        """What is kept here for others, and what of others is held here, for people."""

    def close(self) -> None:
        """The agent is shutting down."""


class RRefExtension:
    """Keeps the books when references travel."""

    def __init__(self, ledger: RRefContext, book: Book) -> None:
        self._ledger = ledger
        self._book = book

    def outgoing(self, to: int, references: Sequence[Placed]) -> tuple[ForkInfo, ...]:
        """See `Keeper.outgoing`."""
        ledger = self._ledger
        forks: list[ForkInfo] = []
        try:
            for position, reference in references:
                handle = self._own(reference)
                from_fork = handle._use.fork if handle._use else None
                with ledger.lock:
                    if not ledger.rules.has(handle._id, from_fork):  # another thread released it just now
                        raise handle.released_error()
                    fork = ledger.rules.pass_on(handle._id, from_fork, to=to, fork=ledger.new_fork())
                forks.append(ForkInfo(position, fork.rref, fork.fork, fork.owner, handle._ordered))
        except BaseException:
            self.not_sent(to, forks)
            raise
        return tuple(forks)

    def _own(self, handle: Reference) -> RRef[object]:
        assert isinstance(handle, RRef)
        handle._check()
        if handle._book is not self._book:
            raise ReferenceGone(
                f"{handle!r} belongs to worker {handle._book.agent.me.name!r}, which lives in this process, too, and "
                f"cannot be sent by worker {self._ledger.agent.me.name!r}"
            )
        return handle

    def not_sent(self, to: int, forks: Sequence[ForkInfo]) -> None:
        """See `Keeper.not_sent`."""
        for info in forks:
            with self._ledger.lock:
                effects = self._ledger.rules.not_sent(protocol.Fork(info.rref, info.fork, info.owner), to)
            self._ledger.carry_out(effects)

    def incoming(self, sender: int, forks: Sequence[ForkInfo]) -> list[Placed]:
        """See `Keeper.incoming`."""
        ledger = self._ledger
        placed: list[Placed] = []
        for info in forks:
            use = None if info.owner == ledger.me else UserRRef(info.fork)
            handle = self._book.make_handle(info.rref, use, info.owner, info.ordered)
            with ledger.lock:
                if use is None:
                    ledger.kept.setdefault(info.rref, OwnerValue(info.ordered))
                else:
                    ledger.uses[info.fork] = use
                effects = ledger.rules.received(sender, protocol.Fork(info.rref, info.fork, info.owner))
                if use is not None:
                    use.confirmed = use.settled = sender == info.owner
            placed.append((info.position, handle))
            ledger.carry_out(effects)
        return placed

    def when_confirmed(self, references: Sequence[Placed], action: Callable[[], None]) -> bool:
        """See `Keeper.when_confirmed`."""
        uses = [handle._use for _, handle in references if isinstance(handle, RRef) and handle._use is not None]
        return self._ledger.when_settled(uses, action)

    def creating(self, creation: Creation, caller: int) -> None:
        """See `Keeper.creating`."""
        ledger = self._ledger
        if caller == ledger.me:
            return  # it is here since the call was made
        with ledger.lock:
            kept = ledger.kept.setdefault(creation.rref, OwnerValue())
            if creation.ordered and kept.mailbox is None:
                kept.mailbox = OrderedQueue()
            ledger.rules.created(creation.rref, creation.fork, caller, creation.after)

    def computed(self, creation: Creation, value: object, error: BaseException | None) -> None:
        """See `Keeper.computed`."""
        ledger = self._ledger
        with ledger.lock:
            kept = ledger.kept.get(creation.rref)
        if kept is not None:
            kept.set(value, None if error is None else to_keep(error, ledger.agent.me.name))
        with ledger.lock:
            effects = ledger.rules.computed(creation.rref)
        ledger.carry_out(effects)

    def not_in_turn(self, turn: StreamPosition, caller: int) -> None:
        """See `Keeper.not_in_turn`."""
        self.skip(caller, turn)

    def skip(self, caller: int, turn: StreamPosition, *, last: bool = False) -> None:
        """A call of an ordered object that lives here will not come."""
        try:
            kept = self._ledger.find_for(caller, turn.rref)
        except ReferenceGone:  # then nobody waits for the turn
            return

        def skip() -> None:
            if kept.mailbox is not None:
                kept.mailbox.skip(caller, turn, last=last)

        if kept.when_ready(skip):
            skip()

    def held(self) -> list[str]:
        """See `Keeper.held`."""
        return self._book.held()

    def traffic(self) -> Traffic:
        """See `Keeper.traffic`."""
        return self._ledger.traffic(not self._book.settled())

    def close(self) -> None:
        """See `Keeper.close`."""
        self._book.close()
