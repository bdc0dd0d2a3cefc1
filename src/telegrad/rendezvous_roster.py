"""The list of all registrations of a new group, as one entry of the store: the *roster*.

If every worker read the registrations of all others one by one, a store would serve n * n of them. So whoever completes
a set of entries puts it together for all:

- Ranks are in blocks of BLOCK. A worker that has written its entry looks at those of its block. If it finds all, it
  marks the block as complete and looks at the marks of all blocks. The store serializes operations, so the last worker
  of a block finds its block complete, and the last block to become complete finds all complete. More than one worker
  may find that.
- Whoever finds all registrations reads them, checks each, and writes the roster. The others read it alone.

The roster is authenticated as every entry is, by a worker that has the group's token. All who have the token could
write any registration in any case, so a roster gives them no more power. Each worker checks that its own registration
is in it, and the digest of the roster is what it confirms (see `telegrad.rendezvous`).

Whatever the size of the group, a worker decodes its own record and a few others (`telegrad.connection.packed_group`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.packed_group import PackedGroup, digest_of, pack
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError, UnauthenticatedRecord
from telegrad.rendezvous_records import Records
from telegrad.rendezvous_store import pause

BLOCK = 64
"""How many ranks are in a block: a worker looks at so many entries, and the last of a block at n / BLOCK marks."""
_ROSTER = "roster"
_MAX_PACKED = 8_000_000  # bytes of an entry: torch's TCPStore refuses a value of more than 8 MiB
_WHAT = "the list of all workers"

Key = Callable[[int], str]
"""Returns the name of the entry of a rank."""


class Roster(msgspec.Struct, frozen=True):
    """The first line of the entry. The rest of it is a `PackedGroup`."""

    digest: str


def has_roster(store: Store) -> bool:
    """Return whether all workers have registered."""
    return store.check([_ROSTER])


def write_roster(store: Store, records: Records, group: Sequence[WorkerRecord]) -> None:
    """Write the roster unless there is one."""
    data = pack(group)
    if len(data) > _MAX_PACKED:
        raise RendezvousError(f"{_WHAT} would have more than {_MAX_PACKED} bytes in the rendezvous store")
    head = records.encode(_ROSTER, Roster(digest_of(data)))
    store.compare_set(_ROSTER, "", head.encode() + b"\n" + data)  # type: ignore[arg-type]  # torch takes bytes, too


def read_roster(store: Store, records: Records, world_size: int) -> PackedGroup:
    """Return the records of all workers. Raises RendezvousError if they are not `world_size`, or not authenticated."""
    head, _, data = store.get(_ROSTER).partition(b"\n")
    roster = records.decode(_ROSTER, head, Roster, _WHAT)
    if len(data) > _MAX_PACKED:
        raise RendezvousError(f"{_WHAT} in the rendezvous store has more than {_MAX_PACKED} bytes")
    digest = digest_of(data)
    if digest != roster.digest:
        raise UnauthenticatedRecord(
            f"{_WHAT} in the rendezvous store was changed by somebody who does not have the token of this group"
        )
    group = PackedGroup(data, digest)
    if len(group) != world_size:
        raise RendezvousError(f"{_WHAT} in the rendezvous store has {len(group)}, not {world_size}")
    return group


def completes(store: Store, key: Key, rank: int, world_size: int) -> bool:
    """Return whether all ranks have their entry, after this worker has written that of its rank.

    False does not mean that an entry is missing, but that another worker finds all of them.
    """
    block, blocks = rank // BLOCK, -(-world_size // BLOCK)
    if not store.check([key(other) for other in range(block * BLOCK, min(world_size, (block + 1) * BLOCK))]):
        return False
    if blocks == 1:
        return True
    store.set(_mark(key, block), "1")
    return store.check([_mark(key, other) for other in range(blocks)])


def _mark(key: Key, block: int) -> str:
    return f"complete/{key(block)}"


def absent(store: Store, key: Key, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have no entry, with few operations if there are few."""
    missing: list[int] = []
    parts = [ranks[start : start + BLOCK] for start in reversed(range(0, len(ranks), BLOCK))]
    while parts:
        part = parts.pop()
        if not store.check([key(rank) for rank in part]):
            if len(part) == 1:
                missing.extend(part)
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return missing


def sign_off(store: Store, rank: int, registered: bool, expected: Sequence[int], deadline: float) -> None:
    """Announce that this worker no longer needs the store. Rank 0 also waits until all `expected` ranks have done so.

    Only the worker that registered the rank signs off for it, not another that tried to. The announcement needs no
    reply (TCPStore sends none), so rank 0 may exit as soon as it has seen the last. A worker that died meanwhile is not
    an error here: calls to it will fail.
    """
    if registered:
        store.set(f"left/{rank}", "1")
    if rank == 0:
        start = time.monotonic()
        parts = [expected[first : first + BLOCK] for first in range(0, len(expected), BLOCK)]
        while parts and time.monotonic() < deadline:
            if store.check([f"left/{other}" for other in parts[-1]]):
                parts.pop()  # and not looked for again
            else:
                pause(start, deadline)
