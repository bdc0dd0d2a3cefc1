"""What other workers do in a backward pass appears in the profiler of the worker that calls backward()."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.profiler_legacy import profile as legacy_profile

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.observe.profiling.passes import PassProfiling
from telegrad.testing.group import local_group


@pytest.fixture(name="agents")
def _agents() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def exponential_of_sine(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("c", sine, (x,)).exp()


def run_pass() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("b", exponential_of_sine, (x,)).sum()])
        return autograd.get_gradients(context)[x]


def places(profile: Any) -> set[tuple[str, int]]:
    found = profile.function_events if hasattr(profile, "function_events") else profile.events()
    return {(event.name, event.node_id) for event in found}


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("profiler", [legacy_profile, torch.profiler.profile])
def test_nodes_of_all_workers_are_shown(profiler: Any) -> None:
    expected = run_pass()
    with profiler() as profile:
        assert run_pass().equal(expected)
    assert {("ExpBackward0 @b", 1), ("SinBackward0 @c", 2), ("SumBackward0", 0)} <= places(profile)


def test_a_pass_that_is_not_profiled_is_not_recorded(agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(PassProfiling, "recorded", lambda *args: asked.append(args))
    run_pass()
    assert asked == []


def test_a_worker_that_does_not_answer_is_left_out(agents: dict[str, Agent], caplog: pytest.LogCaptureFixture) -> None:
    def broken(context: int, number: int) -> bytes:
        raise OSError("no disk")

    agents["c"].register("telegrad.pass_profile", broken)
    with caplog.at_level(logging.WARNING), legacy_profile() as profile:
        run_pass()
    assert ("ExpBackward0 @b", 1) in places(profile)
    assert not any(worker == 2 and "Backward0" in name for name, worker in places(profile))
    assert "worker 'c' is not in the profile of a pass" in caplog.text


def test_only_the_worker_that_began_a_pass_gets_its_profile(agents: dict[str, Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with legacy_profile(), autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("b", exponential_of_sine, (x,)).sum()])
        (number,) = agents["b"].autograd.contexts.get(int(context)).passes
        assert agents["a"].call("b", "@telegrad.pass_profile", (int(context), number))
        assert agents["c"].call("b", "@telegrad.pass_profile", (int(context), number)) == b""
        assert agents["a"].call("b", "@telegrad.pass_profile", (int(context), number + 1)) == b""
