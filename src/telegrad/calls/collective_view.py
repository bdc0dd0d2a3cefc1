"""Who takes part in a collective: the *view*, and its digest, which stands for it in messages.

Otherwise every member would send the names of all members with every collective. A member knows the view of the whole
group itself, and remembers others by their digests. One whose view it does not know has to send it once.
"""

from __future__ import annotations

import hashlib
import threading

import msgspec

from telegrad.connection.peers import Peers

View = tuple[tuple[str, int, int], ...]
"""The members of a collective: name, generation and incarnation, by id."""

DIGEST_SIZE = 16
_MAX_KNOWN = 256  # views that a member remembers; of another one it asks for the names again
_encode = msgspec.msgpack.Encoder().encode


def digest_of(view: View) -> bytes:
    """Return the digest of a view."""
    return hashlib.blake2b(_encode(view), digest_size=DIGEST_SIZE).digest()


def current_view(peers: Peers) -> View:
    """Return the view of the whole group, as this worker knows it."""
    # In an open group workers come and go; in a fixed one, those that are gone have to be replaced.
    is_open = peers.members.is_open
    return tuple(
        (peer.record.name, peer.record.generation, peer.record.incarnation)
        for peer in peers.all()
        if not (is_open and peer.gone)
    )


class KnownView:
    """A view, and what is looked up in it for every message."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.incarnations = {name: incarnation for name, _, incarnation in view}
        self.places = {name: place for place, (name, _, _) in enumerate(view)}
        self.checked = -1
        """The number of changes of the group after which all members were found there (`Peers.changes`)."""

    def name(self, place: int) -> str:
        """Return the name of the member with this number in the tree."""
        return self.view[place][0]


class KnownViews:
    """The views of the collectives that this worker takes part in, by digest."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.Lock()  # held while _known is changed; single reads need none
        self._known: dict[bytes, KnownView] = {}
        self._current: tuple[int, bytes, KnownView] | None = None
        """The whole group, after so many changes of it. Replaced as a whole, so it needs no lock."""

    def current(self) -> tuple[bytes, KnownView]:
        """Return the view of the whole group, as this worker knows it, and its digest."""
        changes, current = self._peers.changes, self._current
        if current is None or current[0] != changes:
            view = current_view(self._peers)
            digest = digest_of(view)
            current = self._current = changes, digest, self._known.get(digest) or KnownView(view)
        return current[1:]

    def find(self, digest: bytes) -> KnownView | None:
        """Return the view with this digest. None: a member has to send it."""
        known = self._known.get(digest)
        if known is None:
            mine, current = self.current()
            known = self.keep(digest, current) if mine == digest else None
        return known

    def add(self, digest: bytes, view: View) -> KnownView | None:
        """Remember a view that a member has sent. None: it has another digest, or workers that cannot be members."""
        members = self._peers.members
        names = {name for name, _, _ in view}
        if digest_of(view) != digest or len(names) != len(view):
            return None
        if not members.is_open and not all(members.find(name) for name in names):
            return None
        return self.keep(digest, KnownView(view))

    def keep(self, digest: bytes, known: KnownView) -> KnownView:
        """Remember a view."""
        with self._lock:
            self._known.pop(digest, None)
            self._known[digest] = known
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return known
