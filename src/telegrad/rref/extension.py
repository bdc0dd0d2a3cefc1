"""References in messages: forks them when a message leaves, and creates handles for those that arrive.

The agent calls this through `telegrad.calls.keeper.Keeper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from telegrad.calls.keeper import Placed
from telegrad.calls.keeper import Traffic as ReferenceTraffic
from telegrad.errors import ReferenceGone
from telegrad.protocol import ownership as protocol
from telegrad.rref.context import RRefContext
from telegrad.rref.handle import RRef, UserRRef
from telegrad.rref.ordered import OrderedQueue
from telegrad.rref.owner import OwnerValue, storable_error
from telegrad.wire.messages import Creation, ForkInfo, Turn
from telegrad.wire.payload import Reference

if TYPE_CHECKING:
    from telegrad.rref.manager import RRefManager


class RRefExtension:
    """Tells the ownership rules about references that messages carry."""

    def __init__(self, context: RRefContext, manager: RRefManager) -> None:
        self._context = context
        self._manager = manager

    def outgoing(self, to: int, references: Sequence[Placed]) -> tuple[ForkInfo, ...]:
        """See `Keeper.outgoing`."""
        context = self._context
        forks: list[ForkInfo] = []
        try:
            for position, reference in references:
                handle = self._own(reference)
                from_fork = handle._user.fork if handle._user else None
                with context.lock:
                    if not context.rules.has(handle._id, from_fork):  # another thread has just released it
                        raise handle.released_error()
                    fork = context.rules.pass_on(handle._id, from_fork, to=to, fork=context.new_fork())
                forks.append(ForkInfo(position, fork.rref, fork.fork, fork.owner, handle._ordered))
        except BaseException:
            self.not_sent(to, forks)
            raise
        return tuple(forks)

    def _own(self, handle: Reference) -> RRef[object]:
        assert isinstance(handle, RRef)
        handle._check()
        if handle._manager is not self._manager:
            raise ReferenceGone(
                f"{handle!r} belongs to worker {handle._manager.agent.me.name!r} of this process and cannot be sent by "
                f"worker {self._context.agent.me.name!r}"
            )
        return handle

    def not_sent(self, to: int, forks: Sequence[ForkInfo]) -> None:
        """See `Keeper.not_sent`."""
        for info in forks:
            with self._context.lock:
                effects = self._context.rules.not_sent(protocol.Fork(info.rref, info.fork, info.owner), to)
            self._context.perform(effects)

    def incoming(self, sender: int, forks: Sequence[ForkInfo]) -> list[Placed]:
        """See `Keeper.incoming`."""
        context = self._context
        placed: list[Placed] = []
        for info in forks:
            user = None if info.owner == context.me else UserRRef(info.fork)
            handle = self._manager.make_handle(info.rref, user, info.owner, info.ordered)
            with context.lock:
                if user is None:
                    context.values.setdefault(info.rref, OwnerValue(info.ordered))
                else:
                    context.users[info.fork] = user
                effects = context.rules.received(sender, protocol.Fork(info.rref, info.fork, info.owner))
                if user is not None:
                    user.confirmed = user.settled = sender == info.owner
            placed.append((info.position, handle))
            context.perform(effects)
        return placed

    def when_confirmed(self, references: Sequence[Placed], action: Callable[[], None]) -> bool:
        """See `Keeper.when_confirmed`."""
        users = [handle._user for _, handle in references if isinstance(handle, RRef) and handle._user is not None]
        return self._context.when_settled(users, action)

    def creating(self, creation: Creation, caller: int) -> None:
        """See `Keeper.creating`."""
        context = self._context
        if caller == context.me:
            return  # `RRefManager.create` has added it
        with context.lock:
            owned = context.values.setdefault(creation.rref, OwnerValue())
            if creation.ordered and owned.queue is None:
                owned.queue = OrderedQueue()
            context.rules.created(creation.rref, creation.fork, caller, creation.after)

    def computed(self, creation: Creation, value: object, error: BaseException | None) -> None:
        """See `Keeper.computed`."""
        context = self._context
        with context.lock:
            owned = context.values.get(creation.rref)
        if owned is not None:
            owned.set(value, None if error is None else storable_error(error, context.agent.me.name))
        with context.lock:
            effects = context.rules.computed(creation.rref)
        context.perform(effects)

    def not_in_turn(self, position: Turn, caller: int) -> None:
        """See `Keeper.not_in_turn`."""
        self.skip(caller, position)

    def skip(self, caller: int, position: Turn, *, last: bool = False) -> None:
        """Do not wait for a call of an ordered object of this worker."""
        try:
            owned = self._context.find_for(caller, position.rref)
        except ReferenceGone:  # then no call waits for it
            return

        def skip() -> None:
            if owned.queue is not None:
                owned.queue.skip(caller, position, last=last)

        if owned.when_ready(skip):
            skip()

    def held(self) -> list[str]:
        """See `Keeper.held`."""
        return self._manager.held()

    def traffic(self) -> ReferenceTraffic:
        """See `Keeper.traffic`."""
        return self._context.traffic(not self._manager.settled())

    def close(self) -> None:
        """See `Keeper.close`."""
        self._manager.close()
