"""The references of one agent: creates them, finds the values that it owns, and lists what is still held."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.agent.shutdown import RRefMessageCounts
from telegrad.calls.call import Access, Call, current_served
from telegrad.calls.client import failure_of
from telegrad.calls.extension import Concern
from telegrad.connection.channel import Channel
from telegrad.errors import CallError, DeadlineExceeded, NotInitialized
from telegrad.options import given_timeout
from telegrad.protocol.rref_ids import ForkId, RRefId
from telegrad.rref.context import RRefContext
from telegrad.rref.extension import RRefExtension
from telegrad.rref.finalizer import Finalizer
from telegrad.rref.fork_messages import ForkMessages
from telegrad.rref.handle import RRef
from telegrad.rref.ids import describe
from telegrad.rref.ordered import CallSequencer
from telegrad.rref.owner import OwnerValue
from telegrad.rref.service import RRefService
from telegrad.rref.user_state import UserRRef
from telegrad.waiting import Event
from telegrad.wire.devices import DevicePairs
from telegrad.wire.frames import Message
from telegrad.wire.messages import Creation, Failure, RRefSkip, StreamPosition

DroppedHandle = tuple[RRefId, ForkId | None, int, bool]
"""What has to be known to release a handle: its reference, fork, owner, and whether the object is ordered."""


class RRefManager:
    """The references of one agent. Create it before the agent starts."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.handle_class: type[RRef[Any]] = RRef
        """The class of handles that calls create and that arrive in messages."""
        self.context = ForkMessages(RRefContext(agent)).context
        self.sequencer = CallSequencer(self.context.incarnation)
        self.service = RRefService(self, self.context)
        self.closed = False
        self._me = self.context.me
        self._finalizer: Finalizer[DroppedHandle] = Finalizer(agent.runtime, agent.executor, self._release)
        self._extension = RRefExtension(self.context, self)
        agent.pipeline.add(self._extension, Concern.REFERENCES)
        agent.references = self
        agent.shutdown_protocol.references = self
        agent.handle(RRefSkip, self._on_skip, urgent=True)

    # -- create -------------------------------------------------------------------------------------------------------

    def own(self, value: Any, *, ordered: bool = False, cls: type[RRef[Any]] | None = None) -> RRef[Any]:
        """Return a reference to a value of this worker."""
        self.check_open()
        owned = OwnerValue(ordered)
        owned.set(value)
        with self.context.lock:
            rref, _ = self.context.ids.new_rref(self.agent.me)
            self.context.values[rref] = owned
            self.context.rules.own(rref)
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
        rref_access: Access | None = None,
        devices: DevicePairs | None = None,
    ) -> RRef[Any]:
        """Have a worker run a function and keep the result. Return a reference to the result at once.

        `keeps` is kept alive until the function has run.
        """
        self.check_open()
        context = self.context
        owner = (record := self.agent.peers.find(to).record).id
        with context.lock:
            (rref, previous), fork = context.ids.new_rref(record), context.ids.new_fork()
            user = None if owner == self._me else UserRRef(fork, creator=True)
            if user is None:
                context.values[rref] = OwnerValue(ordered)
                context.rules.own(rref, computing=True)
            else:
                context.users[fork] = user
                context.rules.start_creation(rref, fork, owner)
        handle = self.make_handle(rref, user, owner, ordered)
        context.record(rref, "made", record.name)
        try:
            self.agent.call_async(
                owner,
                function,
                args,
                kwargs,
                timeout=timeout,
                on_done=partial(self._created, rref, user, keeps),
                creation=Creation(rref, fork, ordered, previous),
                rref_access=rref_access,
                devices=devices,
            )
        except BaseException:
            with context.lock:
                context.rules.cancel_creation(fork)
                context.ids.forget_rref(record, rref, previous)
                effects = context.rules.value_computed(rref)
            context.perform(effects)
            raise
        return handle

    def _created(self, rref: RRefId, user: UserRRef | None, keeps: object, call: Call) -> None:
        """Handle the end of the call that computes a value. Never blocks: it runs on the thread that read the reply."""
        context = self.context
        if user is None:
            with context.lock:
                owned = context.values.get(rref)
            if owned is not None and call.error is not None:  # if the function raised, its error is already set
                owned.set(None, call.error, call.error if isinstance(call.error, CallError) else None)
            return
        if isinstance(call.error, CallError):
            user.error = call.error
        elif isinstance(call.answer, Failure):  # the owner refused the call
            refusal = failure_of(call, self.agent.pipeline)
            user.error = refusal if isinstance(refusal, CallError) else None
        # The function's exception is not decoded here: each access asks the owner, and gets its own exception.
        user.creation = call
        if call.answer is not None:
            with context.lock:
                effects = context.rules.creation_confirmed(user.fork)
            context.perform(effects)
        context.settle(user)

    def make_handle(
        self, rref: RRefId, user: UserRRef | None, owner: int, ordered: bool, cls: type[RRef[Any]] | None = None
    ) -> RRef[Any]:
        """Return a handle of a reference. It is released when it is garbage-collected."""
        self._finalizer.start()
        if ordered:
            self.sequencer.open(owner, rref)
        return (cls or self.handle_class)._make(self, rref, user, owner, ordered)

    def creation_error(self, handle: RRef[Any]) -> CallError | None:
        """Return why the call that computes the value failed, as far as this worker knows."""
        if handle._user is not None:
            return handle._user.error
        owned = self.context.values.get(handle._id)
        return owned.call_error if owned is not None else None

    # -- release ------------------------------------------------------------------------------------------------------

    def drop(self, rref: RRefId, fork: ForkId | None, owner: int, ordered: bool) -> None:
        """Release a handle in the background. Called by destructors, so it takes no lock."""
        self._finalizer.enqueue((rref, fork, owner, ordered))

    def _release(self, dropped: DroppedHandle) -> None:
        rref, fork, owner, ordered = dropped
        if ordered:
            end = self.sequencer.close(owner, rref)
            if end is not None:
                self.agent.tell(owner, RRefSkip(end, last=True))
        context = self.context
        with context.lock:
            if fork is None:
                effects = context.rules.release_handle(rref)
                context.forget_unexpected(rref)
            else:
                effects = context.rules.drop_fork(fork)
                context.users.pop(fork, None)
        context.perform(effects)

    def release_all(self) -> None:
        """Release all references to values of other workers, even those still in use: the group is shutting down."""
        context = self.context
        with context.lock:
            effects = [effect for fork in context.rules.held_forks() for effect in context.rules.drop_fork(fork)]
            users, context.users = context.users, {}
        for user in users.values():
            user.refused = True
            context.settle(user)
        context.perform(effects)

    def settled(self) -> bool:
        """Return whether all garbage-collected handles have been released."""
        return self._finalizer.idle()

    def message_counts(self) -> RRefMessageCounts:
        """Return how many messages about references this worker has sent and received."""
        return self.context.message_counts(not self.settled())

    def check_open(self) -> None:
        """Raise an error if the agent has been shut down."""
        if self.closed or self.agent.closed:
            raise NotInitialized(
                f"worker {self.agent.me.name!r} cannot use references: {self.agent.closed or 'it is being shut down'}"
            )

    def close(self) -> None:
        """Drop all values and fail everything that waits for one: the agent is shutting down."""
        context = self.context
        with context.lock:
            self.closed = True
            values, context.values = context.values, {}
            users, context.users = context.users, {}
        self._finalizer.close()
        error = NotInitialized(f"worker {self.agent.me.name!r} has been shut down, and its references with it")
        for owned in values.values():
            owned.set(None, error)
        for user in users.values():
            context.settle(user)

    # -- fetch --------------------------------------------------------------------------------------------------------

    def deadline(self, timeout: float) -> float | None:
        """Return when a wait with this timeout ends: at the latest when the call being served must end."""
        seconds = given_timeout(timeout)
        seconds = self.agent.settings.rpc_timeout if seconds is None else seconds
        deadline = self.agent.runtime.now() + seconds if seconds else None
        served = current_served.get()
        if served is not None and served.deadline is not None:
            deadline = served.deadline if deadline is None else min(deadline, served.deadline)
        return deadline

    def value(self, rref: RRefId, deadline: float | None) -> Any:
        """Return a value of this worker, and wait until it is computed."""
        self.check_open()
        return self.wait_for_value(self.context.find(rref), rref, deadline)

    def wait_for_value(self, owned: OwnerValue, rref: RRefId, deadline: float | None) -> Any:
        """Return a value once it is computed, or raise what its function raised."""
        if not owned.ready:
            event = self.agent.runtime.event()
            if not owned.when_ready(event.set) and not _wait(self.agent, event, rref, deadline):
                me = self.agent.me.name
                raise DeadlineExceeded(f"{describe(rref)} on worker {me!r} is still being computed", worker=me)
        return owned.get()

    # -- ordered objects ----------------------------------------------------------------------------------------------

    def skip_call(self, owner: int, position: StreamPosition) -> None:
        """Tell the owner of an ordered object that a call was never sent."""
        self.agent.tell(owner, RRefSkip(position))

    def _on_skip(self, channel: Channel, head: RRefSkip, message: Message) -> None:
        self._extension.skip(channel.worker.id, head.stream_position, channel.account, last=head.last)

    # -- hold list ----------------------------------------------------------------------------------------------------

    def held(self) -> list[str]:
        """Describe the values that others hold, and the values of others held here, one line each."""
        context = self.context
        with context.lock:
            owned, held = context.rules.owned(), list(context.rules.held_forks().values())
            kinds = {rref: _describe_kind(value) for rref, value in context.values.items()}
        lines = []
        for rref, users in owned.items():
            if users:
                names = " and ".join(repr(context.name_of(user)) for user in users)
                lines.append(f"{describe(rref)}, {kinds.get(rref, 'a value')} of this worker, is held by {names}")
        lines += [f"{describe(rref)} of worker {context.name_of(owner)!r} is held here" for rref, owner in held]
        return lines

    def counts(self) -> dict[str, int]:
        """Return how many values and references there are, by kind."""
        context = self.context
        with context.lock:
            owned = context.rules.owned()
            return {
                "values": len(context.values),
                "owned": len(owned),
                "shared": sum(bool(users) for users in owned.values()),
                "forks elsewhere": context.rules.fork_count(),
                "forks": len(context.rules.held_forks()),
                "users": len(context.users),
                "unsettled": sum(not user.settled for user in context.users.values()),
                "sequences": self.sequencer.count(),
            }


def _describe_kind(owned: OwnerValue) -> str:
    if not owned.ready:
        return "a value that is being computed"
    if owned.error is not None:
        return f"a value that failed with {type(owned.error).__name__}"
    return f"a {type(owned.value).__name__}"


def _wait(agent: Agent, event: Event, rref: RRefId, deadline: float | None) -> bool:
    """Wait for a value, visibly."""
    waits = agent.local.waits
    key = waits.enter("value", (), lambda: f"the value of {describe(rref)}", current_served.get(), rref)
    try:
        return agent.executor.wait(event, deadline)
    finally:
        waits.leave(key)
