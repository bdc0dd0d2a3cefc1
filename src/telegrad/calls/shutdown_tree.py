"""The tree of a shutdown as this worker knows it: to whom it reports, and who has to report to it.

`telegrad.protocol.collective_tree` has the tree of workers that are not gone, and `telegrad.protocol.shutdown_parents`
what follows if others know another one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from telegrad.calls.collective_messages import DETACHED, INSISTS, ROOT
from telegrad.calls.collective_node import connect_to
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer, PeerTable
from telegrad.connection.peers import Peers
from telegrad.errors import NotInitialized
from telegrad.protocol.collective_tree import Tree, static_children
from telegrad.protocol.shutdown_parents import ShutdownParents


class ShutdownTree:
    """The place of this worker in a shutdown."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self._fan_out = local.settings.fan_out
        self._lock = threading.Lock()  # held while _parents is changed; single reads need none
        self._parents = ShutdownParents()

    def now(self) -> tuple[Tree, PeerTable, int]:
        """Return the tree as this worker knows it, all workers, and its own number in the tree."""
        peers, avoided = self._peers.table, self._parents.avoided
        tree = Tree(len(peers), peers.is_gone, self._fan_out)
        if avoided:
            root = tree.root()

            def is_gone(member: int) -> bool:
                return peers.is_gone(member) or (member != root and peers.at(member).record.incarnation in avoided)

            tree = Tree(len(peers), is_gone, self._fan_out)
        return tree, peers, peers.place_of(self._local.me.id)

    def is_inner(self, member: int, size: int) -> bool:
        """Return whether somebody is below a member, while nobody is gone."""
        return bool(static_children(member, size, self._fan_out))

    # -- above --------------------------------------------------------------------------------------------------

    def target(self) -> Peer:
        """Return the worker to which this one reports: itself, unless it is a leaf of the tree."""
        tree, peers, place = self.now()
        parent = tree.parent(place)
        if self._local.closed:
            raise NotInitialized(f"worker {self._local.name!r} cannot take part in a shutdown: {self._local.closed}")
        if self._local.given_up is not None:
            raise self._local.given_up
        return peers.at(place if parent is None or self.is_inner(place, len(peers)) else parent)

    def above(self, target: Peer) -> int:
        """Return what to tell a parent: the id of its own parent, -1 if it is the root, or that this worker insists."""
        insists = self._parents.insists(self._local.runtime.now())
        return INSISTS if insists else self._id_above(target)

    def reports_to(self) -> int | None:
        """Return the id of the parent of this worker; -1 if it is the root; None if the parent may be dead.

        That is found out: a worker that is not in a shutdown may have no connection with its parent.
        """
        tree, peers, place = self.now()
        above = tree.parent(place)
        if above is None:
            return ROOT
        parent = peers.at(above)
        if any(channel.link is not None for channel in parent.channels()):
            return parent.record.id
        connect_to(self._local, self._peers, [parent.record.name])
        return None

    def _id_above(self, worker: Peer) -> int:
        tree, peers, _ = self.now()
        parent = tree.parent(peers.place_of(worker.record.id))
        return ROOT if parent is None else peers.at(parent).record.id

    def sent_away(self, parent: Peer, asked: float, answer: object) -> None:
        """Note that a worker, which was asked at some time, does not take this one as its child."""
        with self._lock:
            now = self._local.runtime.now()
            self._parents.sent_away(parent.record.incarnation, detached=answer == DETACHED, asked=asked, now=now)

    # -- below --------------------------------------------------------------------------------------------------

    def awaited(self, tree: Tree, peers: PeerTable, place: int) -> list[str]:
        """Return the names of those who have to report to this worker, which has this place in a tree."""
        members = [place, *tree.children(place)]
        members += [other for other in tree.gone_between(place) if self._returns(peers.at(other))]
        awaited = [peers.at(member) for member in members]
        adopted, elsewhere = self._parents.adopted, self._parents.elsewhere
        if adopted or elsewhere:
            awaited = [peer for peer in awaited if peer.record.incarnation not in elsewhere]
            others = [peer for peer in peers.used() if peer.record.incarnation in adopted and not peer.gone]
            awaited += [peer for peer in others if peer not in awaited]
        return [peer.record.name for peer in awaited]

    def _returns(self, peer: Peer) -> bool:
        """Return whether a worker that is gone is about to be started again, by the launcher."""
        awaited = self._local.settings.awaited_replacement
        return peer.failed_at is not None and self._local.runtime.now() < peer.failed_at + awaited

    def is_there(self, name: str, incarnation: int) -> bool:
        """Return whether this incarnation of a worker is not gone."""
        peer = self._peers.find(name)
        return peer.record.incarnation == incarnation and not peer.gone

    def came(self, name: str, *, insists: bool) -> None:
        """Note that a worker reports here."""
        with self._lock:
            self._parents.came(self._peers.find(name).record.incarnation, insists=insists)

    def said(self, incarnation: int, parent: object) -> bool:
        """Note what a child returned from `reports_to`. Return whether the child is not awaited any more."""
        with self._lock:
            here = parent is None or parent == self._local.me.id
            return self._parents.said(incarnation, reports_here=here, now=self._local.runtime.now())

    def asks(self, names: Iterable[str]) -> None:
        """Note which children are missing, and asked."""
        with self._lock:
            self._parents.asks({self._peers.find(name).record.incarnation for name in names})

    @property
    def doubtful(self) -> bool:
        """Whether a child has named another parent lately."""
        return self._parents.doubtful
