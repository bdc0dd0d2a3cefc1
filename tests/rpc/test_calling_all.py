"""One function on many workers, directly and down a tree."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import telegrad
from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.exceptions import RemoteTraceback
from telegrad.default_agent import acting_as
from telegrad.errors import RemoteError, UnknownWorker, WorkerLost, WorkersFailed
from telegrad.rpc import calling_all
from telegrad.rpc.calling_all import FAN_OUT, part_of, split
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

NAMES = [f"w{number}" for number in range(12)]
runs: list[tuple[str, str | None]] = []


@pytest.fixture(params=["direct", "tree"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Agent]]:
    """Twelve workers; the test acts as the first. All calls are large, or none is."""
    monkeypatch.setattr(calling_all, "LARGE", 0 if request.param == "tree" else 1 << 40)
    with local_group(NAMES) as agents, acting_as(agents["w0"]):
        runs.clear()
        yield agents


def where(factor: int, *, offset: int = 0) -> int:
    call = rpc.current_call()
    runs.append((rpc.get_worker_info().name, call.caller if call else None))
    return factor * rpc.get_worker_info().id + offset


async def where_later(factor: int) -> int:
    return where(factor)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


def fail_on(names: str, kind: type[Exception]) -> str:
    name = rpc.get_worker_info().name
    if name in names.split():
        raise kind()
    return name


def test_every_worker_runs_the_function_once_and_results_are_by_name(group: dict[str, Agent]) -> None:
    assert rpc.call_all(where, (10,), {"offset": 1}) == {name: 10 * i + 1 for i, name in enumerate(NAMES)}
    assert sorted(name for name, _ in runs) == sorted(NAMES)
    assert list(rpc.call_all(where, (1,), workers=["w7", 3, "w7"]).items()) == [("w7", 7), ("w3", 3)]
    assert rpc.call_all(where_later, (2,)) == {name: 2 * i for i, name in enumerate(NAMES)}
    assert rpc.call_all(where, (2,), workers=[]) == {}


def test_nobody_sends_a_large_call_to_more_than_a_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling_all, "LARGE", 0)
    with local_group(NAMES) as agents, acting_as(agents["w0"]):
        rpc.call_all(where, (1,))
        receivers = {
            name: {peer.record.name for peer in agent.peers.all() if peer.outgoing is not None} - {name}
            for name, agent in agents.items()
        }
    assert max(map(len, receivers.values())) <= FAN_OUT
    assert set().union(*receivers.values()) == set(NAMES[1:])


def test_errors_keep_their_type_worker_and_traceback(group: dict[str, Agent]) -> None:
    with pytest.raises(KeyError) as one:
        rpc.call_all(fail_on, ("w5", KeyError))
    assert one.value.__notes__[-1] == "(call_all(fail_on), on worker 'w5')"
    with pytest.raises(WorkersFailed, match=r"call_all\(fail_on\) failed on 2 of 12 workers") as several:
        rpc.call_all(fail_on, ("w4 w11", KeyError))
    assert sorted(several.value.errors) == ["w11", "w4"]
    for name, error in several.value.errors.items():
        assert isinstance(error, KeyError)
        assert isinstance(error.__cause__, RemoteTraceback)
        assert (error.__cause__.worker, "in fail_on" in error.__cause__.text) == (name, True)
    with pytest.raises(RemoteError, match="has a lock"):
        rpc.call_all(fail_on, ("w8", Unpicklable))


def test_an_unknown_worker_is_an_error_before_anything_runs(group: dict[str, Agent]) -> None:
    with pytest.raises(UnknownWorker, match="nobody"):
        rpc.call_all(where, (1,), workers=["w1", "nobody"])
    assert runs == []


def test_workers_behind_a_lost_one_are_named(group: dict[str, Agent], request: pytest.FixtureRequest) -> None:
    group["w3"].close()
    with pytest.raises((WorkerLost, WorkersFailed)) as failed:
        rpc.call_all(where, (1,))
    errors = failed.value.errors if isinstance(failed.value, WorkersFailed) else {"w3": failed.value}
    assert all(isinstance(error, WorkerLost) and "w3" in str(error) for error in errors.values())
    if "tree" in request.node.name:
        assert sorted(errors) == ["w3"]  # the last of its part
        group["w1"].close()
        with pytest.raises(WorkersFailed) as failed:
            rpc.call_all(where, (1,))
        errors = failed.value.errors
        assert sorted(errors) == ["w1", "w2", "w3"]
        assert errors["w2"].__notes__ == [
            "(worker 'w1' passed the call on to worker 'w2', which may or may not have run it)"
        ]
    else:
        assert sorted(errors) == ["w3"]


def test_gradients_are_those_of_one_process(group: dict[str, Agent]) -> None:
    x = torch.arange(3.0, dtype=torch.double, requires_grad=True)
    with autograd.context() as context:
        results = rpc.call_all(scaled, (x,))
        autograd.backward(context, [sum(results.values(), torch.zeros((), dtype=torch.double))])
        gradient = autograd.get_gradients(context)[x]
    assert torch.equal(gradient, 2 * x.detach() * sum(range(1, 13)))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (rpc.get_worker_info().id + 1) * (x * x).sum()


@telegrad.idempotent
def repeatable() -> int:
    return where(1)


@telegrad.expose
def exposed(value: int) -> int:
    return value + rpc.get_worker_info().id


def test_idempotent_and_registered_functions_are_called_directly(group: dict[str, Agent]) -> None:
    rpc.register("where", where)
    for agent in group.values():
        agent.register("where", where)
    assert len(rpc.call_all(repeatable)) == len(rpc.call_all("@where", (1,))) == 12
    assert {caller for _, caller in runs} == {"w0"}


def test_exposed_functions_are_called_directly_in_registered_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling_all, "LARGE", 0)
    settings = AgentSettings(accept="registered")
    with local_group(NAMES[:6], settings=settings) as agents, acting_as(agents["w0"]):
        assert list(rpc.call_all(exposed, (1,)).values()) == [1, 2, 3, 4, 5, 6]


@given(st.integers(1, 400))
def test_each_worker_gets_a_call_from_exactly_one(count: int) -> None:
    names = [str(number) for number in range(count)]
    senders: dict[str, list[str]] = {}

    def send(sender: str, to: Any) -> None:
        parts = split(to) if to else []
        assert len(parts) <= FAN_OUT
        for part in parts:
            senders.setdefault(part[0], []).append(sender)
            assert list(part_of(part[0], names)) == list(part[1:])
            send(part[0], part[1:])

    send("caller", names)
    assert {name: len(those) for name, those in senders.items()} == dict.fromkeys(names, 1)
