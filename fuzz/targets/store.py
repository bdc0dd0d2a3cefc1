"""Records of the rendezvous store, which anybody on the network may be able to write."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fuzz.mutators import mutate_json
from fuzz.target import Target
from telegrad import rendezvous
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError


def _run(data: bytes) -> None:
    try:
        outcome = rendezvous._decode_outcome(data)
        assert outcome.status == "complete" or outcome.status in rendezvous._ERRORS
    except RendezvousError:
        registration = rendezvous._decode_registration(data, "rank 0")
        assert len(str(registration)) <= rendezvous.MAX_RECORD
        rendezvous._check(registration, 0)


def _seeds() -> Iterable[bytes]:
    record = WorkerRecord("a", 0, 5, ("unix:///run/a.sock", "tcp://[::1]:80", "tcp://host:1"), "host", "main")
    yield msgspec.json.encode(rendezvous.Registration(record, 2, 17, "machine"))
    yield msgspec.json.encode(rendezvous.Outcome("complete"))
    yield msgspec.json.encode(rendezvous.Outcome("duplicate", "two workers are called 'a'"))


STORE = Target("store", _run, (RendezvousError,), _seeds, mutate_json)
