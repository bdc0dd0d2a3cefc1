"""Decides which group a worker forms or joins at a store, which may have seen many groups.

The store holds the current *epoch*: a number, the random identity of its group, and whether the group is open. The
epoch changes by compare-and-set only, so all workers agree on the order. The entries of an epoch have its number and
identity as prefix. A worker that comes to the store looks at the current epoch:

1. There is none: it begins the first.
2. The epoch is *forming*: it takes part (`telegrad.rendezvous`).
3. The epoch is *complete*, and a member of another name is alive and stays: it joins that group, in the place of the
   member of its own name. Members say in the store when they leave, or that all have agreed to. Killed ones do not, so
   members are probed. During a graceful shutdown, until all have agreed, a replacement still joins.
4. The epoch is complete, and all other members have left or are dead: it begins the next. If a worker of its own name
   is alive, though, it was started twice, which is an error.
5. The epoch is *superseded*: it begins the next.
6. The epoch *failed*: a process that took part in it begins the next, and so does one that a launcher started again,
   or that was started after the failure. All others get the error of the epoch: they came too late. If a worker was
   interrupted (Ctrl-C), those who wait with it get an error, and all who come later begin the next.

A worker that was killed while its group formed stays registered. When another one finds it in its place and knows that
it is dead (a later start by the same launcher, or no process with its number on this machine), it supersedes the epoch,
and all meet again in the next.

In an *open* group (`world_size` 0), nobody waits for anybody. The epoch itself lists the members, and a worker joins by
adding itself with a compare-and-set. So no worker that dies blocks others, two that join at the same time see each
other, and names and ids are unique. Members that leave stay in the list, marked, because their names and ids stay
theirs as long as the group exists.

The process of rank 0 may host the store. When it dies, the group goes on without a store. Its replacement hosts a new,
empty store, where the other members publish the group as soon as they find it (`telegrad.rendezvous_members`). Until
then the replacement takes part in a forming epoch, which cannot become complete: the survivors never register in it.
They supersede it. So no rule has to tell a first start from a replacement. Only the replacement of rank 0 of an *open*
group, which would not wait for anybody, waits for the survivors for `REPUBLISH_WAIT` seconds, if TELEGRAD_RESTART says
that it is a replacement.

What a hostile store can do with epochs: It can show an old epoch, another one to each worker, or none. Then workers
wait in different epochs until the timeout, or begin another group; a group still forms only if all its workers confirm
the same records in the same epoch, because the entries are bound to it. It can hide a group from a newcomer. It cannot
invent one: a newcomer joins only members that prove in a handshake that they know the token. It can send a newcomer to
another group with the same token. So a hostile store can prevent groups, as before, and mix those that share a token.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from telegrad.connection.group_keys import GroupKeys
from telegrad.connection.worker_record import FoundGroup, WorkerRecord
from telegrad.errors import RendezvousError, StoreLost
from telegrad.rendezvous import has_outcome, read_outcome, report_failure, store_errors
from telegrad.rendezvous_file import Prefixed
from telegrad.rendezvous_members import Noticeboard, is_over, read_current, swap_current
from telegrad.rendezvous_records import Epoch, Records, Registration
from telegrad.rendezvous_search import Probe, Search, Terms
from telegrad.rendezvous_store import MAX_TIMEOUT

STORE_GRACE = 10.0
"""Seconds for which a worker that lost the store during the rendezvous looks for another at the same address."""


class GroupFinder:
    """Finds or forms the group of one worker."""

    def __init__(
        self,
        store: Store,
        world_size: int,
        timeout: float,
        *,
        history: dict[int, int] | None = None,
        restart: int = -1,
        is_host: bool = False,
        any_id: bool = False,
        one_kind: bool = False,
        reopen: Callable[[float], Store] | None = None,
    ) -> None:
        """`reopen` opens the store again, or one that has taken its place, within seconds. For the rest see `Terms`."""
        self._store = store
        self._terms = Terms(
            world_size,
            min(timeout, MAX_TIMEOUT),
            time.monotonic(),
            {} if history is None else history,
            restart,
            is_host,
            any_id,
            one_kind,
        )
        self._reopen = reopen
        self.registered = False
        """Whether other workers know that this one is there."""
        self.board: Noticeboard | None = None
        """What this worker publishes, once it has found its group."""

    def find(
        self,
        me: WorkerRecord,
        keys: GroupKeys | None,
        listen_if_needed: Callable[[Sequence[WorkerRecord]], None],
        probe: Probe,
    ) -> FoundGroup:
        """Return the group, when it is complete or there is one to join. Raises as `assemble` does."""
        terms = self._terms
        mine = Registration(me, terms.world_size, os.getpid(), socket.gethostname(), terms.restart)
        while True:
            search = Search(self._store, terms, mine, keys, listen_if_needed, probe)
            try:
                with store_errors(self._store, f"worker {me.name!r} (rank {me.id})"):
                    found, self.board = search.run()
                return found
            except StoreLost as error:
                self._look_for_another_store(error)
            finally:
                self.registered |= search.registered

    def report(self, who: str, keys: GroupKeys | None, error: BaseException, *, of_another: bool = False) -> None:
        """Tell the workers that wait in a forming group that this one failed before it registered.

        With `of_another`, it was a worker of another process, and one of this process is still to hear of it.
        """
        if self.registered or not self._terms.world_size:
            return
        try:
            with store_errors(self._store, who):
                text, current = read_current(self._store, keys)
                if current is None or self._has_ended(current, keys):
                    number = 1 if current is None else current.number + 1
                    swap_current(self._store, keys, text, Epoch(number, secrets.randbits(63), self._terms.world_size))
                    _, current = read_current(self._store, keys)
                if current is not None and current.world_size:
                    store = Prefixed(current.prefix, self._store)
                    if not of_another:
                        self._terms.history[-1 - current.group] = current.group  # no worker has this incarnation
                    report_failure(store, Records(keys, store, current.prefix), who, error)
        except RendezvousError as other:
            error.add_note(f"The other workers could not be told: {other}")

    def _has_ended(self, epoch: Epoch, keys: GroupKeys | None) -> bool:
        """Return whether the others will meet in the epoch after this one."""
        store = Prefixed(epoch.prefix, self._store)
        records = Records(keys, store, epoch.prefix)
        if not epoch.world_size or not has_outcome(store):
            return False
        status = read_outcome(store, records).status
        if status != "complete":
            return status in ("superseded", "interrupted") or epoch.group in self._terms.history.values()
        return is_over(store, records)

    def _look_for_another_store(self, error: StoreLost) -> None:
        """Open the store that rank 0 hosts after it was started again, or has begun another group."""
        left = min(STORE_GRACE, self._terms.deadline - time.monotonic())
        if self._reopen is None or left <= 0:
            raise error
        try:
            self._store = self._reopen(left)
        except RendezvousError:
            raise error from error.__cause__
