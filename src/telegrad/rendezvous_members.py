"""What the members of a group publish in the store, so that newcomers find them.

A group of a fixed size has the registrations of its workers from when it formed (`rank/<id>`), a newer record of each
member that was replaced since (`member/<id>`), and a note of each that has left alone (`departed/<id>`) or that all
have left (`over`). An open group has the list of members in its epoch. All entries are authenticated. A record is
replaced only by one of a later generation, or by the worker itself.

The store may be lost with the process that hosts it. When there is another one at its address, any member can publish
the whole group there (`Noticeboard.publish_group`): the result is the same whoever does it, and however many do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.rendezvous import has_outcome, read_outcome, set_outcome
from telegrad.rendezvous_file import Prefixed
from telegrad.rendezvous_records import MAX_LIST, Departure, Epoch, Records, Registration, check_epoch, check_record
from telegrad.rendezvous_roster import absent

_Change = Callable[[tuple[Registration, ...]], tuple[Registration, ...]]

_CURRENT = "current"
_OVER = "over"
_MAX_TRIES = 1000  # compare-and-sets that may fail because others were faster


def read_current(store: Store, keys: GroupKeys | None) -> tuple[str, Epoch | None]:
    """Return the current epoch of a store, if there is one, and its text for `swap_current`."""
    if not store.check([_CURRENT]):
        return "", None
    data = store.get(_CURRENT)
    epoch = Records(keys, store).decode(_CURRENT, data, Epoch, "the current epoch", MAX_LIST)
    check_epoch(epoch)
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
        ranks = range(self._epoch.world_size)
        found: dict[int, Registration] = {}
        for key in ("rank/{}".format, "member/{}".format):  # the second replaces the first
            missing = set(absent(store, key, ranks))
            present = [rank for rank in ranks if rank not in missing]
            for rank, data in zip(present, store.multi_get([key(rank) for rank in present]), strict=True):
                found[rank] = records.decode(key(rank), data, Registration, f"the record of rank {rank}")
                check_record(found[rank].record, rank)
        stayed = set(absent(store, _departure_key, list(found)))
        return [
            replace(member, left=rank not in stayed and _has_departed(store, records, member))
            for rank, member in sorted(found.items())
        ]

    def publish(self, record: WorkerRecord) -> None:
        """Publish the record of this worker, if it has joined a group that existed."""
        if record == self._mine.record and (self.is_open or not self._exists):
            return  # it is there
        self._mine = replace(self._mine, record=record)
        if self.is_open:
            self._change_list(lambda members: _with(members, self._mine))
        else:
            self.publish_group(self._store, [record])

    def leave(self, *, is_over: bool = False) -> None:
        """Publish that this worker leaves the group, or with `is_over` that all have agreed to leave it."""
        if self.is_open:
            mine = self._mine.record.incarnation
            self._change_list(
                lambda members: tuple(
                    replace(member, left=member.left or member.record.incarnation == mine) for member in members
                )
            )
            return
        store, records = self._of_epoch(self._store)
        name = _OVER if is_over else _departure_key(self._mine.record.id)
        store.set(name, records.encode(name, Departure(self._mine.record.incarnation)))

    def is_over(self) -> bool:
        """Return whether all members of a group of a fixed size have agreed to leave it."""
        return is_over(*self._of_epoch(self._store))

    def remove(self, gone: Collection[WorkerRecord]) -> None:
        """Mark members of an open group that were lost."""
        incarnations = {record.incarnation for record in gone}
        if incarnations and self.is_open:
            self._change_list(lambda members: _marked(members, incarnations))

    def publish_group(self, store: Store, group: Sequence[WorkerRecord], gone: Collection[int] = ()) -> bool:
        """Publish the whole group, as this member knows it, in another store that has taken the place of a lost one.

        `gone` has the incarnations of lost members. Returns False if there is another group now.
        """
        own, records = self._of_epoch(store)
        known = [Registration(one, self._epoch.world_size, 0, "", lost=one.incarnation in gone) for one in group]
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
            return all(member.gone for member in epoch.members)
        forming = Prefixed(epoch.prefix, store)
        records = Records(self._keys, store, epoch.prefix)
        message = f"{self._mine} is in a group that exists"
        outcome = read_outcome(forming, records) if has_outcome(forming) else None
        outcome = outcome or set_outcome(forming, records, "superseded", message)
        return outcome.status != "complete"

    def _of_epoch(self, store: Store) -> tuple[Store, Records]:
        return Prefixed(self._epoch.prefix, store), Records(self._keys, store, self._epoch.prefix)

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


def is_over(store: Store, records: Records) -> bool:
    """Return whether all members of the group of an epoch have agreed to leave it."""
    if not store.check([_OVER]):
        return False
    records.decode(_OVER, store.get(_OVER), Departure, "the end of the group")
    return True


def _departure_key(rank: int) -> str:
    return f"departed/{rank}"


def _has_departed(store: Store, records: Records, member: Registration) -> bool:
    name = _departure_key(member.record.id)
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
    return tuple(replace(member, lost=member.lost or member.record.incarnation in gone) for member in members)
