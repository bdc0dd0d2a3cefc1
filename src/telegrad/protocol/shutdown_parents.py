"""Who reports to whom in a shutdown, while workers know different groups.

The tree of a shutdown (`telegrad.protocol.collective_tree`) counts everybody once if all know the same group. Two
workers that have lost each other, while others have not, know different trees for ever. These rules let every shutdown
end nevertheless:

1. A child says whom it holds for the parent of its parent. If that stays wrong for DETACH seconds, its parent sends it
   away for good (*detached*), and the child *avoids* this parent: it reports to the next one above. Nobody avoids the
   one that it holds for the root: there is none above, and it would end alone.
2. A worker that was sent away for INSIST seconds *insists*: whoever it asks then takes it as a child (*adopts* it).
3. A worker asks the children that it misses to whom they report. One that reports elsewhere for GIVE_UP seconds is not
   waited for any more, until it comes. One that has no connection with its parent does not know: the parent may be
   dead, and the child has not noticed. It connects to it, and says so or loses it.

The one to which a worker reports always has a lower number. So the workers form trees, by rule 2 every worker is taken
by its parent in the end, and by rule 3 nobody waits for others than its children. If there are several trees, each ends
by itself.
"""

from __future__ import annotations

from collections.abc import Collection

DETACH = 5.0
"""Seconds for which a child and its parent may know different groups before they act on it."""
INSIST = 70.0
"""Seconds after which a worker that is sent away again and again has to be taken.

A loss may be noticed 60 s later on one side than on the other, and most differences end by that.
"""
GIVE_UP = INSIST + 4 * DETACH
"""Seconds for which a child must have reported elsewhere before it is not waited for."""


class ShutdownParents:
    """What one worker knows of it. Workers are named by their incarnation, so a replacement is another one."""

    def __init__(self) -> None:
        self.avoided: frozenset[int] = frozenset()
        """Workers to which this one does not report, except to the root."""
        self.adopted: set[int] = set()
        """Workers that report here, although this one does not hold them for its children."""
        self.elsewhere: set[int] = set()
        """Workers that do not report here, although this one holds them for its children."""
        self._strayed: dict[int, float] = {}  # children that named another parent, and since when
        self._away_since: float | None = None

    # -- above --------------------------------------------------------------------------------------------------

    def sent_away(self, parent: int, *, detached: bool, asked: float, now: float) -> None:
        """Note that `parent`, which this worker had asked at a time, does not take it."""
        self.avoided = self.avoided | {parent} if detached else frozenset()
        # A parent that took longer had taken it, and knows another group since.
        if self._away_since is None or now - asked >= INSIST:
            self._away_since = asked if now - asked < INSIST else now

    def insists(self, now: float) -> bool:
        """Return whether this worker has to be taken, by whom it asks."""
        return self._away_since is not None and now - self._away_since >= INSIST

    # -- below --------------------------------------------------------------------------------------------------

    def came(self, worker: int, *, insists: bool) -> None:
        """Note that a worker reports here."""
        self.elsewhere.discard(worker)
        self._strayed.pop(worker, None)
        if insists:
            self.adopted.add(worker)
        else:
            self.adopted.discard(worker)

    def said(self, worker: int, *, reports_here: bool, now: float) -> bool:
        """Note to whom a worker says that it reports. Return whether it is not waited for any more."""
        if reports_here:
            self._strayed.pop(worker, None)
            return False
        if now - self._strayed.setdefault(worker, now) < GIVE_UP:
            return False
        del self._strayed[worker]
        if worker in self.adopted:
            self.adopted.discard(worker)
        else:
            self.elsewhere.add(worker)
        return True

    def asks(self, workers: Collection[int]) -> None:
        """Note which children are missing, and asked. What others said before counts no more."""
        self._strayed = {worker: since for worker, since in self._strayed.items() if worker in workers}

    @property
    def doubtful(self) -> bool:
        """Whether a child has named another parent lately, and has to be asked again soon."""
        return bool(self._strayed)
