"""One profile of a whole group."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import wait_until

import telegrad
from telegrad import autograd, launch, observe, rpc
from telegrad.agent.agent import Agent
from telegrad.calls.registry import Registry
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.observe.profiling.process_profile import process_profiler
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def profiles_itself(x: torch.Tensor) -> bool:
    with torch.profiler.profile() as profile:
        x + 1
    return "aten::add" in {event.name for event in profile.events()}


def profile_three_workers() -> list[Any]:
    """Return what worker 0 found: events by worker, processes of the trace, and errors."""
    if telegrad.get_worker_info().id:
        return []
    x = torch.ones(3, requires_grad=True)
    with observe.profile(record_shapes=True) as profile, autograd.context() as context:
        y = rpc.rpc_sync(2, square, (rpc.rpc_sync(1, square, (x,)),))
        autograd.backward(context, [y.sum()])
    events = profile.events()
    names = [{event.name for event in events if event.node_id == worker} for worker in range(3)]
    forward = [min(event.time_range.start for event in events if event.name == f"aten::mul @worker{n}") for n in (1, 2)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    processes = sorted(event["args"]["name"] for event in trace if event["name"] == "process_name")
    with observe.profile() as cut:
        works = rpc.rpc_sync(1, profiles_itself, (x.detach(),))
    return [names, forward, processes, "aten::mul @worker1" in profile.table(), profile.missing, works, cut.missing]


def test_a_profile_has_all_threads_of_all_workers() -> None:
    results = launch.local(profile_three_workers, 3, timeout=100)[0]
    names, forward, processes, in_table, missing, works, missing_then = results
    assert "SumBackward0 @worker0" in names[0]
    assert {"aten::mul @worker1", "MulBackward0 @worker1"} <= names[1]
    assert {"aten::mul @worker2", "MulBackward0 @worker2"} <= names[2]
    assert forward == sorted(forward)
    assert processes == ["worker 'worker0'", "worker 'worker1'", "worker 'worker2'"]
    assert in_table
    assert missing == missing_then == {}
    assert works  # although the group was being profiled


@pytest.fixture(name="agents")
def _agents() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b"]) as agents, acting_as(agents["a"]):
        yield agents


@pytest.mark.usefixtures("agents")
def test_a_worker_whose_program_profiles_cannot_profile_the_group() -> None:
    with torch.profiler.profile(), pytest.raises(TelegradError, match=r"'a' cannot profile the group: .* already"):
        observe.profile().start()
    with observe.profile():  # the profiler has stopped
        pass


def test_a_worker_that_is_lost_is_named(agents: dict[str, Agent]) -> None:
    with observe.profile() as profile:
        torch.ones(2)
        agents["b"].close()
    assert "aten::ones @a" in {event.name for event in profile.events()}
    assert list(profile.missing) == ["b"]
    with pytest.raises(TelegradError, match="started already"):
        profile.start()


def test_a_worker_that_loses_the_starter_leaves_the_profile_to_the_others_of_its_process(
    agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, drop = threading.Event(), process_profiler.drop

    def drop_and_tell(*args: int) -> None:
        drop(*args)
        heard.set()

    monkeypatch.setattr(process_profiler, "drop", drop_and_tell)
    with observe.profile() as profile:
        agents["b"].peers.lost_workers.peer_lost(agents["b"].peers.find("a"), "its cable was cut")
        assert heard.wait(60)
        torch.ones(2)
    assert "aten::ones @a" in {event.name for event in profile.events()}


def test_workers_stop_recording_if_the_start_is_interrupted(
    agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(call: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(agents["a"].client, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            observe.profile().start()
    profiling, server = agents["b"].profiling.group, agents["b"].server
    wait_until(lambda: profiling._stopped and not server.unanswered())
    assert profiling._limits == {}
    with observe.profile() as later:
        pass
    assert later.missing == {}


def test_a_start_that_is_served_after_the_stop_leaves_nothing_behind(agents: dict[str, Agent]) -> None:
    profiling = agents["b"].profiling.group
    assert profiling.stop(7) == b""
    profiling.start(7, 0, agents["a"].me.id)
    assert profiling._limits == {}
    with observe.profile() as later:
        pass
    assert later.missing == {}


def test_a_worker_stops_recording_if_the_one_that_profiles_is_lost(agents: dict[str, Agent]) -> None:
    profile = observe.profile()
    profile.start()
    agents["a"].close()
    with acting_as(agents["b"]):
        for _ in range(1000):
            later = observe.profile()
            try:
                later.start()
            except TelegradError:
                agents["b"].executor.pause()
            else:
                later.stop()
                return
    raise AssertionError("the process is still recorded")


def test_in_registered_mode_a_worker_takes_part_only_if_its_program_allows_it() -> None:
    settings, registries = AgentSettings(accept="registered"), {name: Registry() for name in "ab"}
    with local_group(["a", "b"], settings=settings, registries=registries) as agents, acting_as(agents["a"]):
        with observe.profile() as profile:
            pass
        assert "does not show others what it does" in profile.missing["b"]
        with acting_as(agents["b"]):
            observe.serve_profiles(True)
        with observe.profile() as profile:
            pass
        assert profile.missing == {}
