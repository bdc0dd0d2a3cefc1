"""Where the tensors in messages to one peer go: by this worker's device map, by that of a call, or by the peer's."""

from __future__ import annotations

from functools import partial

from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.worker_record import WorkerRecord
from telegrad.wire.devices import DevicePairs, DirectPath, Placement, check_pairs_exist, reversed_pairs

_MOST_KEPT = 64  # placements of one channel: peers choose their maps


class Placements:
    """The placements of one channel."""

    __slots__ = ("_kept", "_local", "_make", "_peer", "direct", "replies", "requests")

    def __init__(self, local: LocalWorker, peer: WorkerRecord) -> None:
        self._local, self._peer = local, peer
        self.direct: DirectPath | None = None
        """The path from device to device, if there is one. No process opens handles of its own."""
        if local.direct is not None and peer.host == local.me.host != "" and peer.id != local.me.id:
            self.direct = local.direct
        self._make = partial(local.placement, local.name, peer.name, peer.devices, direct=self.direct)
        self._kept: dict[tuple[DevicePairs, bool], Placement] = {}
        self.requests = self._make(local.device_maps.get(peer.name, ()))
        """Where tensors in requests go, unless the call has a map of its own."""
        self.replies = self._make((), is_reply=True)
        """Where tensors in replies go if the caller has no map."""

    def for_request(self, pairs: DevicePairs) -> Placement:
        """Return where tensors go in a request with a map of its own. Raise ValueError if a device in it is missing."""
        if (found := self._kept.get((pairs, False))) is None:
            me, peer = self._local.me, self._peer
            check_pairs_exist(pairs, me.name, me.devices, peer.name, peer.devices, "device_map")
            found = self._keep(pairs, is_reply=False)
        return found

    def for_reply(self, pairs: DevicePairs) -> Placement:
        """Return where tensors go in the reply to a request with this map."""
        reverse = reversed_pairs(pairs)
        return self._kept.get((reverse, True)) or self._keep(reverse, is_reply=True)

    def _keep(self, pairs: DevicePairs, *, is_reply: bool) -> Placement:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        made = self._kept[pairs, is_reply] = self._make(pairs, is_reply=is_reply)
        return made
