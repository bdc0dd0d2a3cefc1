"""Dialling a worker that has several addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.channels import FakeAgent

from telegrad.connection import dialer as module
from telegrad.connection.dialer import Dialer
from telegrad.connection.worker_record import WorkerRecord

BOTH = WorkerRecord("b", 1, 2, ("tcp://10.0.0.2:1", "tcp://[fd00::2]:1"))
FIRST, SECOND = BOTH.addresses


class Network:
    """A transport that answers as scripted, and records how long each attempt may take."""

    resumable = True

    def __init__(self, answers: dict[str, OSError | str]) -> None:
        self.answers = answers
        self.attempts: list[tuple[str, float]] = []

    def reaches(self, address: str) -> bool:
        return True

    def connect(self, address: str, deadline: float) -> str:
        self.attempts.append((address, deadline))
        answer = self.answers[address]
        if isinstance(answer, OSError):
            raise answer
        return answer


def make_dialer(network: Network) -> Dialer:
    local: Any = FakeAgent()
    local.me = WorkerRecord("a", 0, 1, ("tcp://10.0.0.1:1", "tcp://[fd00::1]:1"))
    local.executor = SimpleNamespace(block=lambda: None, unblock=lambda: None)
    local.runtime = SimpleNamespace(now=lambda: 100.0)
    transports: Any = {"tcp": network}
    return Dialer(local, transports)


def test_the_next_address_is_tried_if_the_first_does_not_answer_in_its_share_of_the_time() -> None:
    network = Network({FIRST: TimeoutError("no answer"), SECOND: "link"})
    dialer = make_dialer(network)
    assert dialer.dial(BOTH, 110.0, resumable=True) == ("link", SECOND)
    assert network.attempts == [(FIRST, 100.0 + module._ONE_ADDRESS), (SECOND, 110.0)]


def test_the_address_that_worked_is_tried_first_the_next_time() -> None:
    network = Network({FIRST: OSError("no route"), SECOND: "link"})
    dialer = make_dialer(network)
    dialer.dial(BOTH, 110.0, resumable=True)
    dialer.dial(BOTH, 110.0, resumable=True)
    assert [address for address, _ in network.attempts] == [FIRST, SECOND, SECOND]
    dialer.failed(BOTH, SECOND)
    assert dialer.route_to(BOTH)[1] == FIRST


def test_a_worker_refuses_only_if_all_its_addresses_do() -> None:
    refused, silent = ConnectionRefusedError("refused"), TimeoutError("no answer")
    with pytest.raises(ConnectionRefusedError):
        make_dialer(Network({FIRST: refused, SECOND: refused})).dial(BOTH, 110.0, resumable=True)
    for answers in ({FIRST: refused, SECOND: silent}, {FIRST: silent, SECOND: refused}):
        with pytest.raises(TimeoutError):
            make_dialer(Network({**answers})).dial(BOTH, 110.0, resumable=True)


def test_a_shortage_of_this_worker_ends_the_attempts() -> None:
    network = Network({FIRST: OSError(24, "too many open files"), SECOND: "link"})
    with pytest.raises(OSError, match="too many open files"):
        make_dialer(network).dial(BOTH, 110.0, resumable=True)
    assert len(network.attempts) == 1


def test_the_address_that_errors_name_is_one_that_the_channel_dials() -> None:
    """The socket of a dead worker is removed, and then its TCP address is the best for a new channel."""
    here, there = "unix:///run/a.sock", "unix:///run/b.sock"
    network, gone = Network({}), Network({})
    gone.resumable, gone.reaches = False, lambda address: False  # type: ignore[method-assign]
    dialer = make_dialer(network)
    own: Any = dialer
    own._transports["unix"] = gone
    own._local.me = WorkerRecord("a", 0, 1, (here, "tcp://10.0.0.1:1"))
    target = WorkerRecord("b", 1, 2, (there, FIRST))
    assert dialer.route_to(target)[1] == FIRST
    assert dialer.route_to(target, resumable=False)[1] == there
