"""Members of a collective that have called different functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.calls.collective_kinds import tagged, untagged
from telegrad.errors import PayloadError, ProtocolError
from telegrad.rpc.api import acting_as
from telegrad.testing.group import local_group


def _in_each(agents: dict[str, Agent], calls: dict[str, Callable[[], object]]) -> dict[str, object]:
    """Make a call on each worker at the same time, and return the results and errors."""

    def one(name: str) -> object:
        with acting_as(agents[name]):
            try:
                return calls[name]()
            except (ValueError, PayloadError) as error:
                return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return dict(zip(calls, threads.map(one, calls), strict=True))


def test_a_barrier_is_not_taken_for_an_all_gather() -> None:
    with local_group(["a", "b", "c"]) as agents:
        different = {"a": lambda: rpc.all_gather(3), "b": rpc.barrier, "c": rpc.barrier}
        errors = _in_each(agents, different)
        for error in errors.values():
            assert isinstance(error, ValueError)
            assert "worker 'a' called all_gather(), and workers 'b' and 'c' called barrier()" in str(error)
        same = dict.fromkeys(agents, lambda: rpc.all_gather(1))
        assert set(map(str, _in_each(agents, same).values())) == {"{'a': 1, 'b': 1, 'c': 1}"}


def test_an_all_gather_of_nothing_is_not_taken_for_a_barrier() -> None:
    with local_group(["a", "b"]) as agents:
        errors = _in_each(agents, {"a": lambda: rpc.all_gather(None), "b": rpc.barrier})
        assert all("the same collectives in the same order" in str(error) for error in errors.values())
        values = _in_each(agents, dict.fromkeys(agents, lambda: rpc.all_gather(None)))
        assert values == {name: {"a": None, "b": None} for name in agents}


def test_a_broadcast_is_not_taken_for_an_all_gather() -> None:
    with local_group(["a", "b"]) as agents:
        errors = _in_each(agents, {"a": lambda: rpc.broadcast(1, "a"), "b": lambda: rpc.all_gather(2)})
        said = "worker 'a' called broadcast(), and worker 'b' called all_gather()"
        assert all(said in str(error) for error in errors.values())


def test_a_value_that_cannot_be_sent_is_named_as_the_value() -> None:
    with local_group(["a", "b"]) as agents:
        calls = {"a": lambda: rpc.all_gather(1), "b": lambda: rpc.all_gather({"x": (i for i in ())})}
        errors = _in_each(agents, calls)
        assert isinstance(errors["b"], PayloadError)
        assert str(errors["b"]).startswith("the value['x'] cannot be sent")
        assert "worker 'b' cannot take part in all_gather(): the value['x'] cannot be sent" in str(errors["a"])


@pytest.mark.parametrize(
    "sent", [None, [], {"a": 1, "b": 2}, {"a": tagged("all_gather()", 1)}, {"a": (1, 2), "b": None}]
)
def test_values_that_nobody_can_have_sent_are_refused(sent: object) -> None:
    with pytest.raises(ProtocolError, match="worker 'a' did not send the values of all workers"):
        untagged("all_gather()", sent, ["a", "b"], "a")
