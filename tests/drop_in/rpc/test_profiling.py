"""Torch's names of remote profiling. PyTorch's own suites test the rest, see docs/migrating.md."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler_legacy import profile as legacy_profile

from telegrad.agent.agent import Agent
from telegrad.drop_in import rpc

X = torch.ones(2)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("profiler", [legacy_profile, torch.profiler.profile])
def test_events_have_torchs_names(profiler: type) -> None:
    with profiler() as profile:
        rpc.rpc_sync("b", torch.add, (X, 1))
    found = profile.function_events if hasattr(profile, "function_events") else profile.events()
    names = [event.name for event in found]
    assert {"rpc_sync#aten::add(a -> b)", "rpc_sync#aten::add(a -> b)#remote_op: aten::add"} <= set(names)


@pytest.mark.usefixtures("agents")
def test_the_next_call_can_be_named() -> None:
    with legacy_profile() as profile:
        rpc.RemoteProfilerManager.set_current_profiling_key("a name")
        with pytest.raises(RuntimeError, match="current key is already set"):
            rpc.RemoteProfilerManager.set_current_profiling_key("another")
        rpc._get_current_rpc_agent().agent.call("b", torch.add, (X, 1))
    names = {event.name for event in profile.function_events}
    assert {"a name", "a name#remote_op: aten::add"} <= names


def test_a_worker_has_its_own_number_in_the_profiler(agents: dict[str, Agent]) -> None:
    rpc._set_profiler_node_id(agents["a"].me.id)
    with pytest.raises(RuntimeError, match="and no other"):
        rpc._set_profiler_node_id(17)


def test_what_telegrad_does_not_measure_is_refused() -> None:
    rpc.enable_gil_profiling(False)
    with pytest.raises(RuntimeError, match="telegrad does not measure"):
        rpc.enable_gil_profiling(True)
    with pytest.raises(RuntimeError, match="when it's not running"):
        rpc._disable_server_process_global_profiler()
    with rpc._server_process_global_profile(enabled=False):
        pass


@pytest.mark.usefixtures("agents")
def test_all_calls_that_a_worker_serves_can_be_profiled() -> None:
    profile = rpc._server_process_global_profile(profile_memory=True, record_shapes=True)
    with profile:  # of worker a, which calls itself
        rpc.rpc_sync("a", torch.add, (X, 1))
        rpc.rpc_sync("a", torch.mul, (X, 2))
        with pytest.raises(RuntimeError, match="not reentrant"):
            profile.__enter__()
    rpc.rpc_sync("a", torch.sub, (X, 1))
    calls = [{event.name for event in call} for call in profile.process_global_function_events]
    assert ["aten::add" in call for call in calls] == [True, False]
    assert ["aten::mul" in call for call in calls] == [False, True]
    assert profile.key_averages()
