"""What the members of a group publish in the store, so that newcomers find them.

A group of a fixed size has the registrations of its workers from when it formed (`rank/<id>`), a newer record of each
member that was replaced since (`member/<id>`), and a note of each that has left (`departed/<id>`). An open group has
the list of members in its epoch. All entries are authenticated. A record is replaced only by one of a later generation,
or by the worker itself.

The store may be lost with the process that hosts it. When there is another one at its address, any member can publish
the whole group there (`Noticeboard.publish_group`): the result is the same whoever does it, and however many do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.rendezvous import has_outcome, read_outcome, set_outcome
from telegrad.rendezvous_records import MAX_LIST, Departure, Epoch, Records, Registration, check_record

_Change = Callable[[tuple[Registration, ...]], tuple[Registration, ...]]

_CURRENT = "current"
_MAX_TRIES = 1000  # compare-and-sets that may fail because others were faster


def read_current(store: Store, keys: GroupKeys | None) -> tuple[str, Epoch | None]:
    """Return the current epoch of a store, if there is one, and its text for `swap_current`."""
    if not store.check([_CURRENT]):
        return "", None
    data = store.get(_CURRENT)
    epoch = Records(keys, store).decode(_CURRENT, data, Epoch, "the current epoch", MAX_LIST)
    if not 0 <= epoch.group < 2**63:
        raise RendezvousError(f"the current epoch in the rendezvous store has an invalid group {epoch.group}")
    for member in epoch.members:
        check_record(member.record, member.record.id)
    return data.decode(errors="replace"), epoch


def swap_current(store: Store, keys: GroupKeys | None, text: str, epoch: Epoch) -> bool:
    """Make `epoch` the current one, if the current one has this text. Returns whether it is."""
    new = Records(keys, store).encode(_CURRENT, epoch, MAX_LIST)
    return store.compare_set(_CURRENT, text, new) == new.encode()


class Noticeboard:
    """What one member of a group publishes."""

    def __init__(
        self, store: Store, keys: GroupKeys | None, epoch: Epoch, mine: Registration, *, exists: bool = False
    ) -> None:
        """`exists` says that the group was formed without `mine`."""
        self._exists = exists
        self._store = store
        self._keys = keys
        self._epoch = replace(epoch, members=())
        self._mine = mine

    @property
    def is_open(self) -> bool:
        """Whether the group is open."""
        return not self._epoch.world_size

    def read_members(self) -> list[Registration]:
        """Return the members of a group of a fixed size, by id, as far as they are known."""
        store, records = self._of_epoch(self._store)
        members = []
        for rank in range(self._epoch.world_size):
            for name in (f"member/{rank}", f"rank/{rank}"):
                if store.check([name]):
                    member = records.decode(name, store.get(name), Registration, f"the record of rank {rank}")
                    check_record(member.record, rank)
                    members.append(replace(member, left=_has_departed(store, records, member)))
                    break
        return members

    def publish(self, record: WorkerRecord) -> None:
        """Publish the record of this worker, if it has joined a group that existed."""
        if record == self._mine.record and (self.is_open or not self._exists):
            return  # it is there
        self._mine = replace(self._mine, record=record)
        if self.is_open:
            self._change_list(lambda members: _with(members, self._mine))
        else:
            _publish_member(*self._of_epoch(self._store), self._mine)

    def leave(self) -> None:
        """Publish that this worker leaves the group."""
        if self.is_open:
            gone = {self._mine.record.incarnation}
            self._change_list(lambda members: _marked(members, gone))
            return
        store, records = self._of_epoch(self._store)
        name = f"departed/{self._mine.record.id}"
        store.set(name, records.encode(name, Departure(self._mine.record.incarnation)))

    def remove(self, gone: Collection[WorkerRecord]) -> None:
        """Mark members of an open group that are dead."""
        incarnations = {record.incarnation for record in gone}
        if incarnations and self.is_open:
            self._change_list(lambda members: _marked(members, incarnations))

    def publish_group(self, store: Store, group: Sequence[WorkerRecord], gone: Collection[int] = ()) -> bool:
        """Publish the whole group, as this member knows it, in another store that has taken the place of a lost one.

        `gone` has the incarnations of lost members. Returns False if there is another group now.
        """
        own, records = self._of_epoch(store)
        known = [Registration(one, self._epoch.world_size, 0, "", left=one.incarnation in gone) for one in group]
        known = [self._mine if one.record.name == self._mine.record.name else one for one in known]
        if not self.is_open:
            for member in known:
                _publish_member(own, records, member)
            set_outcome(own, records, "complete")
        for _ in range(_MAX_TRIES):
            text, current = read_current(store, self._keys)
            if current is not None and current.group == self._epoch.group:
                self._store = store
                if self.is_open:
                    self._change_list(lambda members: _with(members, self._mine))
                return True
            if current is not None and not self._supersede(store, current):
                return False
            if self.is_open:
                swap_current(store, self._keys, text, replace(self._epoch, members=tuple(known)))
            else:
                swap_current(store, self._keys, text, self._epoch)
        return False

    def _supersede(self, store: Store, epoch: Epoch) -> bool:
        """End an epoch that is forming. Returns False if its group is complete."""
        if not epoch.world_size:
            return all(member.left for member in epoch.members)
        forming = PrefixStore(epoch.prefix, store)
        records = Records(self._keys, store, epoch.prefix)
        message = f"{self._mine} is in a group that exists"
        outcome = read_outcome(forming, records) if has_outcome(forming) else None
        outcome = outcome or set_outcome(forming, records, "superseded", message)
        return outcome.status != "complete"

    def _of_epoch(self, store: Store) -> tuple[Store, Records]:
        return PrefixStore(self._epoch.prefix, store), Records(self._keys, store, self._epoch.prefix)

    def _change_list(self, change: _Change) -> None:
        """Change the list of members of an open group, if the group is still the current one."""
        for _ in range(_MAX_TRIES):
            text, current = read_current(self._store, self._keys)
            if current is None or current.group != self._epoch.group:
                return
            members = change(current.members)
            if members == current.members or swap_current(
                self._store, self._keys, text, replace(current, members=members)
            ):
                return
        raise RendezvousError(
            f"{self._mine} cannot change the list of members in the rendezvous store: others kept changing it"
        )


def _publish_member(store: Store, records: Records, member: Registration) -> None:
    """Publish a record unless there is one of a later generation."""
    name = f"member/{member.record.id}"
    new = records.encode(name, member)
    for _ in range(_MAX_TRIES):
        text = ""
        if store.check([name]):
            data = store.get(name)
            text = data.decode(errors="replace")
            known = records.decode(name, data, Registration, f"the record of rank {member.record.id}")
            if known.record == member.record or known.record.generation > member.record.generation:
                return
        if store.compare_set(name, text, new) == new.encode():
            return
    raise RendezvousError(f"{member} cannot publish its record in the rendezvous store: others kept changing it")


def _has_departed(store: Store, records: Records, member: Registration) -> bool:
    name = f"departed/{member.record.id}"
    if not store.check([name]):
        return False
    departure = records.decode(name, store.get(name), Departure, f"the departure of rank {member.record.id}")
    return departure.incarnation == member.record.incarnation


def _with(members: tuple[Registration, ...], mine: Registration) -> tuple[Registration, ...]:
    """Return the members with this one in its place, unless a later one has it."""
    others = [member for member in members if member.record.name != mine.record.name]
    later = [
        member
        for member in members
        if member.record.name == mine.record.name
        and member.record.incarnation != mine.record.incarnation
        and member.record.generation > mine.record.generation
    ]
    if later:
        return members
    return tuple(sorted([*others, mine], key=lambda member: member.record.id))


def _marked(members: tuple[Registration, ...], gone: Collection[int]) -> tuple[Registration, ...]:
    return tuple(replace(member, left=member.left or member.record.incarnation in gone) for member in members)
