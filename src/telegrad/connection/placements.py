"""Where the tensors in messages to one peer go: by this worker's device map, by that of a call, or by the peer's."""

from __future__ import annotations

from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.worker_record import WorkerRecord
from telegrad.wire.devices import DevicePairs, Placement, check_pairs_exist, reversed_pairs

_MOST_KEPT = 64  # placements of one channel: peers choose their maps


class Placements:
    """The placements of one channel."""

    __slots__ = ("_class", "_kept", "_local", "_me", "_peer", "replies", "requests")

    def __init__(self, local: LocalWorker, peer: WorkerRecord) -> None:
        self._local, self._me, self._peer = local, local.name, peer
        self._class = local.placement
        self._kept: dict[tuple[DevicePairs, bool], Placement] = {}
        self.requests = self._class(self._me, peer.name, peer.devices, local.device_maps.get(peer.name, ()))
        """Where tensors in requests go, unless the call has a map of its own."""
        self.replies = self._class(self._me, peer.name, peer.devices, is_reply=True)
        """Where tensors in replies go if the caller has no map."""

    def for_request(self, pairs: DevicePairs) -> Placement:
        """Return where tensors go in a request with a map of its own. Raise ValueError if a device in it is missing."""
        if (found := self._kept.get((pairs, False))) is None:
            check_pairs_exist(
                pairs, self._me, self._local.me.devices, self._peer.name, self._peer.devices, "device_map"
            )
            found = self._keep(pairs, is_reply=False)
        return found

    def for_reply(self, pairs: DevicePairs) -> Placement:
        """Return where tensors go in the reply to a request with this map."""
        reverse = reversed_pairs(pairs)
        return self._kept.get((reverse, True)) or self._keep(reverse, is_reply=True)

    def _keep(self, pairs: DevicePairs, *, is_reply: bool) -> Placement:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        made = self._class(self._me, self._peer.name, self._peer.devices, pairs, is_reply=is_reply)
        self._kept[pairs, is_reply] = made
        return made
