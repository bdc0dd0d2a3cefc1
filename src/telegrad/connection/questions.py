"""What a worker asks others before it joins a group: whether they are there, and who the members are."""

from __future__ import annotations

from telegrad.connection.dialer import DescribedMember
from telegrad.connection.handshake import Refused
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import ProtocolError, TelegradError
from telegrad.wire.handshake_messages import Purpose

_PROBE = 2.0  # seconds for a worker to say that it is there


def probe(peers: Peers, me: WorkerRecord, target: WorkerRecord, deadline: float) -> str:
    """Return whether a worker is there: "alive", "leaving", "gone", or "silent" if it does not answer in time."""
    try:
        peers.connector.dialer.ask(me, target, Purpose.PROBE, deadline)
    except Refused as refused:
        return "leaving" if refused.code == "leaving" else "alive"
    except TimeoutError:
        return "silent"
    except (OSError, TelegradError):
        return "gone"
    return "alive"


class Questions:
    """What a worker asks others before it joins. Called with a worker, it says whether that is there; see `probe`."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers

    def __call__(self, target: WorkerRecord) -> str:
        return probe(self._peers, self._local.me, target, self._local.runtime.now() + _PROBE)

    def describe(self, address: str, timeout: float) -> list[DescribedMember]:
        """Return all members of the group, as the worker at the address knows them. Raises what `Dialer.ask` does."""
        deadline = self._local.runtime.now() + timeout
        found: list[DescribedMember] = []
        while True:
            after = found[-1].record.id + 1 if found else 0
            member = self._peers.connector.dialer.describe(self._local.me, address, after, deadline)
            if member is None:
                return found
            if member.record.id < after:
                raise ProtocolError(f"the worker at {address} describes the members of its group out of order")
            found.append(member)
