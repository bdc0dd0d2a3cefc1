"""The search for a group in one store: the rules of `telegrad.rendezvous_epochs`, step by step."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from msgspec.structs import replace
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.worker_record import MAX_ID, FoundGroup, WorkerRecord
from telegrad.errors import DuplicateWorker, RendezvousError, RendezvousTimeout, UnauthenticatedRecord
from telegrad.interrupts import interruptible
from telegrad.rendezvous import Superseded, assemble, has_outcome, raise_outcome, read_outcome, report_failure
from telegrad.rendezvous_file import Prefixed
from telegrad.rendezvous_members import Noticeboard, read_current, swap_current
from telegrad.rendezvous_records import Epoch, Outcome, Records, Registration, claimed_epoch
from telegrad.rendezvous_store import pause

Probe = Callable[[WorkerRecord], str]
"""Returns whether a worker is "alive", "leaving", "gone", or "silent": it does not answer."""
_Result = tuple[FoundGroup, Noticeboard]

REPUBLISH_WAIT = 12.0
"""Seconds for which the replacement of rank 0 of an open group waits for the survivors; they look every 5 s."""
_MAX_PROBES = 32  # members that are asked at the same time whether they are there
_SILENCE = 10.0  # seconds for which a member may not answer, because it is stopped or its machine busy
_LATE = 10.0  # seconds after a failure after which a process that starts then belongs to another run
_MAX_SUPERSEDED = 3  # epochs that one worker supersedes because of dead workers
_STARTED = time.time()


class MixedGroup(RendezvousError):
    """A worker with a world size and one without use the same store."""


class IdTaken(RendezvousError):
    """The id that this worker tried in an open group is not free."""

    def __init__(self, free: int) -> None:
        super().__init__(f"the id is taken; {free} is free")
        self.free = free


@dataclass(frozen=True)
class Terms:
    """What a worker brings to the rendezvous, beside its record."""

    world_size: int
    """0: an open group."""
    timeout: float
    start: float
    """When the worker began to look for its group."""
    history: dict[int, int]
    """The incarnations of this process, and the group of each. The search adds to it."""
    restart: int = -1
    """How often a launcher has started this worker before; -1 without a launcher."""
    is_host: bool = False
    """Whether this process hosts the store."""
    any_id: bool = False
    """Whether the worker may have any id of an open group. Then IdTaken is raised if the one it has is not free."""
    one_kind: bool = False
    """Whether the processes of one start must not mix kinds of groups one after the other either, as in torch."""

    @property
    def deadline(self) -> float:
        """When the search gives up."""
        return self.start + self.timeout

    def keeps_out_others(self, epoch: Epoch, outcome: Outcome) -> bool:
        """Return whether a group of another kind is an error even when it is over: this process missed it."""
        is_of_this_start = outcome.time > _STARTED and epoch.group not in self.history.values()
        return self.one_kind and outcome.status == "complete" and is_of_this_start

    def waits_for_survivors(self) -> bool:
        """Return whether an empty store may be the new store of an open group that exists."""
        return self.is_host and self.restart > 0 and time.monotonic() < self.start + min(self.timeout, REPUBLISH_WAIT)


class Search:
    """The search of one worker for its group in one store."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        mine: Registration,
        keys: GroupKeys | None,
        listen_if_needed: Callable[[Sequence[WorkerRecord]], None],
        probe: Probe,
    ) -> None:
        self._store = store
        self._terms = terms
        self._mine = mine
        self._keys = keys
        self._listen_if_needed = listen_if_needed
        self._probe = probe
        self._superseded = 0
        self.registered = False
        """Whether other workers know that this one is there."""

    def run(self) -> tuple[FoundGroup, Noticeboard]:
        """Return the group, and what this worker publishes about it."""
        terms = self._terms
        join = self._join_fixed if self._mine.world_size else self._join_open
        while True:
            try:
                text, current = read_current(self._store, self._keys)
            except UnauthenticatedRecord as error:
                self._fail_strangers(error)
                raise
            found = join(text, current)
            if found is not None:
                return found
            if time.monotonic() >= terms.deadline:
                raise RendezvousTimeout(
                    f"worker {self._mine.record.name!r} (rank {self._mine.record.id}) found no group within "
                    f"{terms.timeout:g} s: the groups in the rendezvous store kept changing"
                )
            pause(terms.start, terms.deadline)

    def _board(self, epoch: Epoch, *, exists: bool = False) -> Noticeboard:
        return Noticeboard(self._store, self._keys, epoch, self._mine, exists=exists)

    def _fail_strangers(self, error: RendezvousError) -> None:
        """Let the workers of an epoch that this worker cannot read fail, too: their token is another."""
        prefix = claimed_epoch(self._store.get("current"))
        if prefix:
            store = Prefixed(prefix, self._store)
            report_failure(store, Records(self._keys, store, prefix), str(self._mine), error)

    def _advance(self, text: str, current: Epoch | None, *members: Registration) -> Epoch | None:
        """Begin the next epoch; None if another worker was faster."""
        number = 1 if current is None else current.number + 1
        epoch = Epoch(number, secrets.randbits(63), self._mine.world_size, members)
        return epoch if swap_current(self._store, self._keys, text, epoch) else None

    # -- groups of a fixed size -------------------------------------------------------------------------------

    def _join_fixed(self, text: str, current: Epoch | None) -> _Result | None:
        if current is not None and not current.world_size:
            if self._lives(current.members):
                raise MixedGroup(
                    f"{self._mine} was started for {self._mine.world_size} workers, but there is an open group in the "
                    "rendezvous store: pass a world size to all workers, or to none"
                )
            self._advance(text, current)
            return None
        if current is None:
            current = self._advance(text, current)
            return None if current is None else self._form(current)
        store = Prefixed(current.prefix, self._store)
        if not has_outcome(store):
            return self._form(current)
        outcome = read_outcome(store, Records(self._keys, store, current.prefix))
        if outcome.status == "complete":
            return self._join_complete(current) or self._succeed(text, current)
        if outcome.status == "superseded":
            # Whoever superseded it may be about to put another epoch in its place.
            pause(time.monotonic() - 1.0, self._terms.deadline)
        elif not self._is_over(current, outcome):
            # As far as telling others goes: the error is theirs, and must not fail the next epoch.
            self.registered = True
            self._terms.history[self._mine.record.incarnation] = current.group  # the next attempt begins the next
            raise_outcome(outcome)
        self._advance(text, current)
        return None

    def _succeed(self, text: str, complete: Epoch) -> _Result | None:
        """Begin the next epoch after one whose members are gone.

        A newcomer may have joined the last of them before it died, and published its record just now. Either it finds
        the new epoch afterwards (`Noticeboard.publish_group`), or this worker finds its record.
        """
        epoch = self._advance(text, complete)
        if epoch is None:
            return None
        found = self._join_complete(complete)
        if found is not None:
            found[1].publish_group(self._store, ())
        return found

    def _form(self, epoch: Epoch) -> _Result | None:
        terms, record = self._terms, self._mine.record
        store = Prefixed(epoch.prefix, self._store)
        terms.history[record.incarnation] = epoch.group
        self.registered = True
        try:
            records = assemble(
                store,
                record,
                self._keys,
                self._mine.world_size,
                max(0.0, terms.deadline - time.monotonic()),
                self._listen_if_needed,
                epoch=epoch.prefix,
                restart=self._mine.restart,
                is_stale=self._is_stale,
            )
        except Superseded:
            return None
        return FoundGroup(records), self._board(epoch)

    def _is_stale(self, holder: Registration) -> bool:
        """Return whether a worker that registered in a forming group is dead."""
        terms, mine = self._terms, self._mine
        stale = bool(
            (holder.record.name == mine.record.name and mine.restart > holder.restart >= 0)
            or holder.record.incarnation in terms.history
            or (holder.machine == mine.machine and not _process_exists(holder.pid))
        )
        self._superseded += stale
        return stale and self._superseded <= _MAX_SUPERSEDED

    def _is_over(self, epoch: Epoch, outcome: Outcome) -> bool:
        """Return whether this process need not share the error of a failed epoch."""
        if outcome.status == "interrupted":  # by a user, who may try again with the others
            return True
        return epoch.group in self._terms.history.values() or self._mine.restart > 0 or outcome.time + _LATE < _STARTED

    def _join_complete(self, epoch: Epoch) -> _Result | None:
        """Return the group that an epoch has formed, if it exists."""
        board = self._board(epoch, exists=True)
        members = [] if board.is_over() else board.read_members()
        if not self._lives(members):
            return None
        if epoch.world_size != self._mine.world_size:
            raise RendezvousError(
                f"{self._mine} was started for {self._mine.world_size} workers, but its group has {epoch.world_size}: "
                "pass the same world size to all workers"
            )
        self._check_place(members)
        records = [member.record for member in members]
        self._listen_if_needed([*records, self._mine.record])
        self._terms.history[self._mine.record.incarnation] = epoch.group
        self.registered = True
        return FoundGroup(records, exists=True), board

    # -- open groups ------------------------------------------------------------------------------------------

    def _join_open(self, text: str, current: Epoch | None) -> _Result | None:
        terms, mine = self._terms, self._mine
        if current is not None and current.world_size:
            self._check_not_used(current)
        elif current is None and terms.waits_for_survivors():
            return None
        exists = current is not None and not current.world_size and self._lives(current.members)
        records, generation = [mine.record], -1
        self._listen_if_needed(())  # whoever joins later may be on another host
        if exists and current is not None:
            self._check_place(current.members)
            others = [member for member in current.members if member.record.name != mine.record.name]
            records = [one.record for one in current.members if not one.gone or one.record.name == mine.record.name]
            generation = next((one.record.generation + 1 for one in current.members if _succeeds(mine, one)), -1)
            if generation > mine.record.generation:
                mine = replace(mine, record=replace(mine.record, generation=generation))
            members = tuple(sorted([*others, mine], key=lambda member: member.record.id))
            joined = replace(current, members=members)
            epoch = joined if swap_current(self._store, self._keys, text, joined) else None
        else:
            if terms.any_id and mine.record.id:
                raise IdTaken(0)
            epoch = self._advance(text, current, mine)
        if epoch is None:
            return None
        self.registered = True
        board = Noticeboard(self._store, self._keys, epoch, mine)
        return FoundGroup(records, exists=exists, is_open=True, generation=generation), board

    def _check_not_used(self, epoch: Epoch) -> None:
        """Raise an error if a group of a fixed size is forming or exists."""
        store = Prefixed(epoch.prefix, self._store)
        if has_outcome(store):
            outcome = read_outcome(store, Records(self._keys, store, epoch.prefix))
            board = self._board(epoch)
            members = [] if outcome.status != "complete" or board.is_over() else board.read_members()
            if not (self._lives(members) or self._terms.keeps_out_others(epoch, outcome)):
                return
        raise MixedGroup(
            f"{self._mine} was started without a world size, but there is a group of {epoch.world_size} workers in the "
            "rendezvous store: pass a world size to all workers, or to none"
        )

    # -- members ----------------------------------------------------------------------------------------------

    def _lives(self, members: Sequence[Registration]) -> bool:
        """Return whether a member is alive and stays. One with this worker's name must not be."""
        mine = self._mine
        own = [member for member in members if member.record.name == mine.record.name]
        others = [member.record for member in members if member not in own and not member.gone]
        if _one_is_alive(others, self._probe, self._terms.deadline):
            return True
        if mine.restart <= 0 and any(self._answers(member) for member in own):
            self._refuse_duplicate(own[0])
        return False

    def _refuse_duplicate(self, member: Registration) -> NoReturn:
        raise DuplicateWorker(
            f"{member} is in the group and alive, so {self._mine} cannot join it under the same name. Give each worker "
            "its own name, or end the first one"
        )

    def _answers(self, member: Registration) -> bool:
        return not member.gone and self._probe(member.record) == "alive"

    def _check_place(self, members: Sequence[Registration]) -> None:
        """Raise an error if this worker's name or id belongs to another worker of an existing group."""
        mine = self._mine
        name, rank, is_open = mine.record.name, mine.record.id, not mine.world_size
        used = {member.record.id for member in members}
        free = next((number for number in range(MAX_ID + 1) if number not in used), 0)
        for member in members:
            if member.record.name == name and member.record.id != rank:
                if self._terms.any_id and not self._answers(member):
                    raise IdTaken(member.record.id)
                raise DuplicateWorker(
                    f"two workers are called {name!r}: {member}, which is in the group, and {mine}. Give each worker "
                    f"its own name, or let the replacement of a worker have its rank, {member.record.id}"
                )
            if member.record.id == rank and member.record.name != name:
                if self._terms.any_id:
                    raise IdTaken(free)
                remedy = f", such as {free}" if is_open else ", and the replacement of a worker its name"
                raise DuplicateWorker(
                    f"two workers have rank {rank}: {member}, which is in the group, and {mine}. Give each worker its "
                    f"own rank{remedy}"
                )
            if member.record.name == name and mine.restart <= 0 and self._answers(member):
                self._refuse_duplicate(member)


def _process_exists(pid: int) -> bool:
    """Return whether there is a process with this number on this machine, or whether that is unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


@interruptible
def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)


def _succeeds(mine: Registration, member: Registration) -> bool:
    """Return whether this worker takes the place of a member that has left in order.

    Of two processes that want the place, only one puts itself into the list of members. So nobody has to vote.
    """
    return member.left and member.record.name == mine.record.name


def _one_is_alive(members: Sequence[WorkerRecord], probe: Probe, deadline: float) -> bool:
    """Return whether one of these members is there and stays. One that does not answer for a while is gone."""
    if not members or probe(members[0]) == "alive":
        return bool(members)
    # Many may be silent, because a machine or a network is down. So they are asked at the same time.
    give_up = min(deadline, time.monotonic() + _SILENCE)
    left, found = iter(members), threading.Event()
    lock = threading.Lock()  # protects `left`

    def ask() -> None:
        while not found.is_set():
            with lock:
                record = next(left, None)
            if record is None:
                return
            while (state := probe(record)) == "silent" and time.monotonic() < give_up and not found.is_set():
                pause(time.monotonic() - 1.0, give_up)
            if state == "alive":
                found.set()

    threads = [
        threading.Thread(target=ask, name=f"telegrad-probe-{number}", daemon=True)
        for number in range(min(len(members), _MAX_PROBES))
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads)
    except BaseException:
        found.set()  # an interrupt: the threads end after the question that they wait for
        raise
    return found.is_set()
