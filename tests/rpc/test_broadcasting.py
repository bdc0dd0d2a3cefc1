"""The value of one worker on all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import PayloadError, TelegradError, WorkerLost
from telegrad.rpc import broadcasting, calling_all
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

NAMES = [f"w{number}" for number in range(7)]


@pytest.fixture(params=["small", "large"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Agent]]:
    """Seven workers. All values are large, or none is."""
    monkeypatch.setattr(calling_all, "LARGE", 0 if request.param == "large" else 1 << 40)
    with local_group(NAMES) as agents:
        yield agents


def on_all(agents: dict[str, Agent], value: Callable[[str], Any] = "of {}".format, **arguments: Any) -> dict[str, Any]:
    """Call broadcast on all workers, with a value for each name, and return what each got, or its error."""

    def run(name: str) -> Any:
        with acting_as(agents[name]):
            try:
                return rpc.broadcast(value(name), **arguments)
            except Exception as error:  # noqa: BLE001 - compared by the test
                return error

    with ThreadPoolExecutor(len(agents)) as pool:
        return dict(zip(agents, pool.map(run, agents), strict=True))


def test_all_workers_get_the_value_of_the_source(group: dict[str, Agent]) -> None:
    assert on_all(group) == dict.fromkeys(NAMES, "of w0")
    assert on_all(group, source="w4", timeout=30) == dict.fromkeys(NAMES, "of w4")
    some = {name: group[name] for name in ("w2", "w5", "w6")}
    assert on_all(some, source="w5", workers=list(some)) == dict.fromkeys(some, "of w5")
    assert all(not broadcasting._inbox(agent)._values for agent in group.values())


def test_a_worker_may_be_listed_twice(group: dict[str, Agent]) -> None:
    some = {name: group[name] for name in ("w1", "w2")}
    assert on_all(some, source="w2", workers=["w1", "w2", "w1"]) == dict.fromkeys(some, "of w2")


def test_workers_that_name_different_sources_all_learn_of_it(group: dict[str, Agent]) -> None:
    some = {name: group[name] for name in ("w1", "w2", "w3")}

    def run(name: str) -> str:
        with acting_as(some[name]), pytest.raises(ValueError, match="broadcast name different sources") as found:
            rpc.broadcast(name, "w2" if name == "w3" else "w1", workers=list(some))
        return str(found.value)

    with ThreadPoolExecutor(len(some)) as pool:
        (text,) = set(pool.map(run, some))
    assert text.endswith("sources: workers 'w1' and 'w2' named 'w1'; worker 'w3' named 'w2'")
    assert on_all(some, workers=list(some), source="w1") == dict.fromkeys(some, "of w1")


def test_a_value_that_cannot_be_sent_is_an_error_for_all_and_the_next_one_arrives(group: dict[str, Agent]) -> None:
    outcomes = on_all(group, lambda name: threading.Lock(), source="w1")
    assert isinstance(outcomes.pop("w1"), PayloadError)
    (text,) = {str(outcome) for outcome in outcomes.values()}
    assert text.startswith("worker 'w1' could not send the value of a broadcast: value cannot be sent: TypeError")
    assert on_all(group) == dict.fromkeys(NAMES, "of w0")


def test_gradients_do_not_flow_back_whatever_the_size(group: dict[str, Agent]) -> None:
    some = {name: group[name] for name in ("w1", "w2")}
    x = torch.ones(3, requires_grad=True) * 2

    def run(name: str) -> torch.Tensor:
        with acting_as(some[name]), autograd.context():
            return rpc.broadcast(x, "w1", workers=list(some))

    with ThreadPoolExecutor(len(some)) as pool:
        source, other = pool.map(run, some)
    assert source is x
    assert (other.is_leaf, other.requires_grad) == (True, True)


def test_one_limit_holds_for_the_whole_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    real = broadcasting.call_all

    def late(*args: Any, **arguments: Any) -> Any:
        limits.append(arguments["timeout"])
        return real(*args, **arguments)

    monkeypatch.setattr(calling_all, "LARGE", 0)
    monkeypatch.setattr(broadcasting, "call_all", late)
    with local_group(["a", "b"]) as agents:
        assert on_all(agents, source="b", timeout=30) == dict.fromkeys(agents, "of b")
        assert on_all(agents, source="b") == dict.fromkeys(agents, "of b")
    assert 0 < limits[0] < 30
    assert limits[1] == 0  # no limit, though calls have one by default


def test_tensors_arrive_as_copies(group: dict[str, Agent]) -> None:
    value = torch.arange(4.0)

    def run(name: str) -> Any:
        with acting_as(group[name]):
            return rpc.broadcast(value if name == "w1" else None, "w1")

    with ThreadPoolExecutor(len(group)) as pool:
        results = list(pool.map(run, NAMES))
    assert all(torch.equal(result, value) for result in results)
    assert [result is value for result in results] == [name == "w1" for name in NAMES]


def test_the_source_must_take_part(group: dict[str, Agent]) -> None:
    with acting_as(group["w0"]), pytest.raises(ValueError, match="worker 'w1' is not among"):
        rpc.broadcast(1, "w1", workers=["w0", "w2"])


def test_all_workers_fail_if_one_is_lost(group: dict[str, Agent]) -> None:
    group.pop("w3").close()
    outcomes = on_all(group, source="w1")
    assert {type(outcome) for outcome in outcomes.values()} == {WorkerLost}


def refuse(*args: Any) -> None:
    raise ValueError("no room")


def test_all_workers_fail_if_the_value_cannot_be_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling_all, "LARGE", 0)
    with local_group(NAMES) as group:
        monkeypatch.setattr(broadcasting._Inbox, "put", refuse)
        outcomes = on_all(group, source="w1")
        assert isinstance(outcomes.pop("w1"), TelegradError)
        texts = {str(outcome) for outcome in outcomes.values() if type(outcome) is TelegradError}
    assert len(texts) == 1
    assert next(iter(texts)).startswith("worker 'w1' could not deliver the value of a broadcast: WorkersFailed")


def test_a_value_that_comes_too_late_is_refused() -> None:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        with pytest.raises(TelegradError, match="worker 'b' takes part in no broadcast"):
            rpc.rpc_sync("b", broadcasting._deliver, ("a", 1, "late"))


def test_values_that_nobody_took_are_dropped_at_the_end() -> None:
    inbox = broadcasting._Inbox()
    with inbox.open():
        with inbox.open():
            assert inbox.put(("a", 1), "unclaimed")
        assert inbox._values
    assert not inbox._values


def test_workers_in_registered_mode_pass_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling_all, "LARGE", 0)
    with local_group(NAMES[:3], settings=AgentSettings(accept="registered")) as agents:
        assert on_all(agents, source=2) == dict.fromkeys(NAMES[:3], "of w2")
