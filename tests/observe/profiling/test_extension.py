"""What callees do appears in the profiler of the caller, and only there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.patience import eventually
from torch.autograd.profiler_legacy import profile as legacy_profile

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.calls.registry import Registry
from telegrad.default_agent import acting_as
from telegrad.errors import CallCancelled, RemoteError, WorkerLost
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

X = torch.ones(3)
Profiler = Callable[..., Any]
profilers = pytest.mark.parametrize(
    "profiler", [legacy_profile, torch.profiler.profile, torch.autograd.profiler.profile]
)


@pytest.fixture(name="agents")
def _agents() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


def events_of(profile: Any) -> list[Any]:
    found = profile.function_events if hasattr(profile, "function_events") else profile.events()
    return list(found)


def names_of(profile: Any, worker: int) -> list[str]:
    return [event.name for event in events_of(profile) if event.is_remote and event.node_id == worker]


def double(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("inside"):
        return x * 2


@pytest.mark.usefixtures("agents")
@profilers
def test_operators_of_the_callee_appear_with_its_name(profiler: Profiler) -> None:
    with profiler() as profile:
        assert rpc.rpc_sync("b", double, (X,)).tolist() == [2, 2, 2]
        rpc.rpc_async("b", double, (X,)).wait()
    names = names_of(profile, 1)
    assert names.count("aten::mul @b") == 2
    events = {event.name: event for event in events_of(profile)}
    call, inside = events["rpc_sync#double(a -> b)"], events["inside @b"]
    assert (call.node_id, inside.node_id) == (0, 1)
    assert "aten::mul @b" in [child.name for child in inside.cpu_children]
    assert events["rpc_async#double(a -> b)"].is_async
    first = next(event for event in events_of(profile) if event.name == "inside @b")
    assert call.time_range.start < first.time_range.start < first.time_range.end < call.time_range.end
    assert "aten::mul @b" in profile.key_averages().table()


@pytest.mark.usefixtures("agents")
def test_the_trace_has_a_process_for_each_worker(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile:
        rpc.rpc_sync("b", double, (X,))
        rpc.rpc_async("c", double, (X,)).wait()
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = {processes[event["pid"]] for event in events if event["name"] == "inside"}
    assert found == {"worker 'b'", "worker 'c'"}
    (call,) = [event for event in events if event["name"] == "rpc_sync#double(a -> b)"]
    (inside,) = [event for event in events if event["name"] == "inside" and processes[event["pid"]] == "worker 'b'"]
    assert call["ts"] < inside["ts"] < inside["ts"] + inside["dur"] < call["ts"] + call["dur"]
    assert [event["ph"] for event in events if event["name"] == "rpc_async#double(a -> c)"] == ["X", "b", "e"]


def shapes_and_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


@pytest.mark.usefixtures("agents")
def test_options_of_the_profiler_hold_on_the_callee() -> None:
    with torch.profiler.profile(record_shapes=True, profile_memory=True, with_flops=True, with_stack=True) as profile:
        rpc.rpc_sync("b", shapes_and_memory, (torch.ones(4, 4),))
    (event,) = [event for event in events_of(profile) if event.name == "aten::mm @b"]
    assert event.input_shapes == [[4, 4], [4, 4]]
    assert event.cpu_memory_usage == 64
    assert event.flops == 128
    assert "shapes_and_memory" in event.stack[0]


def calls_c(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("c", double, (x + 1,))


@pytest.mark.usefixtures("agents")
@profilers
def test_nested_calls_are_profiled(profiler: Profiler) -> None:
    with profiler() as profile:
        rpc.rpc_sync("b", calls_c, (X,))
    assert {"aten::add @b", "rpc_sync#double(b -> c) @b"} <= set(names_of(profile, 1))
    assert {"aten::mul @c", "inside @c"} <= set(names_of(profile, 2))


async def in_steps(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("around an await"):
        y = x * 2
        await asyncio.sleep(0)
        return y - 1


@pytest.mark.usefixtures("agents")
def test_coroutines_are_profiled_step_by_step() -> None:
    with legacy_profile() as profile:
        assert rpc.rpc_sync("b", in_steps, (X,)).tolist() == [1, 1, 1]
    assert {"aten::mul @b", "aten::sub @b", "around an await @b"} <= set(names_of(profile, 1))


async def waits_forever(x: torch.Tensor) -> None:
    x * 2
    await asyncio.Event().wait()


@pytest.mark.usefixtures("agents")
def test_a_coroutine_that_is_profiled_can_be_cancelled() -> None:
    with legacy_profile() as profile:
        future = rpc.rpc_async("b", waits_forever, (X,))
        assert future.cancel()
        with pytest.raises(CallCancelled):
            future.wait()
        rpc.rpc_sync("b", double, (X,))
    assert names_of(profile, 1).count("aten::mul @b") == 1
    (call,) = [event for event in events_of(profile) if "waits_forever" in event.name]
    assert call.node_id == 0


class ScriptedDouble(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def applied(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@pytest.mark.usefixtures("agents")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_operators_inside_torchscript_are_profiled() -> None:
    module = torch.jit.script(ScriptedDouble())
    with legacy_profile() as profile:
        rpc.rpc_sync("b", applied, (module, X))
    assert "aten::mul @b" in names_of(profile, 1)


def fails(x: torch.Tensor) -> None:
    x * 2
    raise ValueError("as it should")


@pytest.mark.usefixtures("agents")
def test_what_a_function_did_before_it_raised_is_shown() -> None:
    with legacy_profile() as profile, pytest.raises(ValueError, match="as it should"):
        rpc.rpc_sync("b", fails, (X,))
    assert "aten::mul @b" in names_of(profile, 1)
    with legacy_profile() as profile, pytest.raises(RemoteError):
        rpc.rpc_sync("b", raises_unpicklable, (X,))
    assert "aten::mul @b" in names_of(profile, 1)


def raises_unpicklable(x: torch.Tensor) -> None:
    class LocalError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    x * 2
    raise LocalError


@pytest.mark.usefixtures("agents")
def test_a_call_to_the_worker_itself_is_profiled() -> None:
    with legacy_profile() as profile:
        rpc.rpc_sync("a", double, (X,))
    assert "aten::mul @a" in names_of(profile, 0)


@pytest.mark.usefixtures("agents")
def test_methods_and_remote_values_are_profiled() -> None:
    with legacy_profile() as profile:
        rref = rpc.remote("b", double, (X,))
        assert rref.rpc_sync().add(1).tolist() == [3, 3, 3]
        rref.to_here()
    names = names_of(profile, 1)
    assert {"aten::mul @b", "aten::add @b"} <= set(names)
    calls = [event.name for event in events_of(profile) if event.name.startswith("rpc_")]
    assert calls == ["rpc_remote#double(a -> b)", "rpc_sync#add(a -> b)"]


def profiles_itself(x: torch.Tensor) -> list[str]:
    x * 2
    with legacy_profile() as profile:
        x + 1
    x - 1
    return [event.name for event in profile.function_events]


@pytest.mark.usefixtures("agents")
def test_a_function_may_use_a_profiler_itself() -> None:
    with legacy_profile() as profile:
        assert "aten::add" in rpc.rpc_sync("b", profiles_itself, (X,))
    names = names_of(profile, 1)
    assert {"aten::mul @b", "aten::sub @b"} <= set(names)
    assert "aten::add @b" not in names


@pytest.mark.usefixtures("agents")
def test_threads_have_profilers_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    both = threading.Barrier(2)

    def run(name: str, function: Callable[..., Any]) -> None:
        with legacy_profile() as profile:
            both.wait(20)
            rpc.rpc_sync("b", function, (X,))
            both.wait(20)
        found[name] = names_of(profile, 1)

    agent = rpc.default_agent()

    def as_a(name: str, function: Callable[..., Any]) -> None:
        with acting_as(agent):
            run(name, function)

    threads = [threading.Thread(target=as_a, args=pair) for pair in (("one", double), ("other", calls_c))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "aten::mul @b" in found["one"]
    assert "aten::add @b" not in found["one"]
    assert "aten::add @b" in found["other"]


def test_calls_of_other_threads_are_not_profiled(agents: dict[str, Agent]) -> None:
    def call() -> None:
        with acting_as(agents["a"]):
            rpc.rpc_sync("b", double, (X,))

    with legacy_profile() as profile:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
    assert events_of(profile) == []


def test_a_profiler_that_starts_between_call_and_reply_shows_nothing_of_it(agents: dict[str, Agent]) -> None:
    future = rpc.rpc_async("b", calls_c, (X,))
    with legacy_profile() as profile:
        future.wait()
    assert names_of(profile, 1) == []
    with legacy_profile():
        future = rpc.rpc_async("b", calls_c, (X,))
    assert future.wait().tolist() == [4, 4, 4]
    eventually(lambda: agents["a"].pipeline.concerned[0] == (), "the end of the callee's profile")


def test_without_a_profiler_the_pipeline_is_as_before(agents: dict[str, Agent]) -> None:
    before = {name: agent.pipeline.concerned for name, agent in agents.items()}
    with legacy_profile():
        rpc.rpc_sync("b", calls_c, (X,))
        assert agents["a"].pipeline.concerned != before["a"]
    eventually(  # callees note that a reply has left after it has arrived
        lambda: {name: agent.pipeline.concerned for name, agent in agents.items()} == before, "the end of the profiles"
    )
    assert agents["a"].autograd.messaging.profiling is None


def test_the_profile_of_a_lost_callee_is_lost_and_the_call_is_shown(agents: dict[str, Agent]) -> None:
    with legacy_profile() as profile:
        future = rpc.rpc_async("b", waits_forever, (X,))
        agents["b"].close()
        with pytest.raises(WorkerLost):
            future.wait()
    assert [event.name for event in events_of(profile) if "rpc" in event.name] == ["rpc_async#waits_forever(a -> b)"]


def many(x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        x.add_(1)


@pytest.mark.usefixtures("agents")
def test_a_profile_with_too_many_events_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("telegrad.observe.profiling.served.MOST_BYTES", 10_000)
    with legacy_profile() as profile:
        rpc.rpc_sync("b", many, (X.clone(), 2000))
    assert 0 < len(names_of(profile, 1)) < 2000
    assert "a profile is incomplete" in caplog.text


def exposed_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_in_registered_mode_a_callee_shows_what_it_does_only_if_its_program_allows_it() -> None:
    registries = {name: Registry() for name in "ab"}
    for registry in registries.values():
        registry.expose(exposed_double, name="double")
    settings = AgentSettings(accept="registered")
    with local_group(["a", "b"], settings=settings, registries=registries) as agents, acting_as(agents["a"]):
        with legacy_profile() as profile:
            assert rpc.rpc_sync("b", exposed_double, (X,)).tolist() == [2, 2, 2]
        assert names_of(profile, 1) == []
        agents["b"].profiling.allow(True)
        with legacy_profile() as profile:
            rpc.rpc_sync("b", exposed_double, (X,))
        assert "aten::mul @b" in names_of(profile, 1)
