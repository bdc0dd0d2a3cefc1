"""The agent with torch's interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.drop_in import rpc
from telegrad.drop_in.rpc import _utils
from telegrad.drop_in.rpc.functions import async_execution


class Shared:
    """State shared by a function and the test that calls it."""

    future: torch.futures.Future[int]
    while_running: dict[str, str]

    @staticmethod
    @async_execution
    def reply_later() -> Any:
        Shared.while_running = rpc._get_current_rpc_agent().get_metrics()
        return Shared.future.then(lambda done: done.wait())


@pytest.mark.usefixtures("agents")
def test_metrics_have_torchs_names() -> None:
    agent = rpc._get_current_rpc_agent()
    idle = {
        "agent.thread_pool_size": "16",
        "agent.num_idle_threads": "16",
        "agent.client_active_calls": "0",
        "agent.server_active_calls": "0",
        "agent.server_active_async_calls": "0",
    }
    assert agent.get_metrics() == agent.get_debug_info() == idle
    Shared.future, Shared.while_running = torch.futures.Future(), {}
    future = rpc.rpc_async("a", Shared.reply_later)
    while agent.get_metrics()["agent.server_active_async_calls"] == "0":
        agent.agent.executor.wait(agent.agent.runtime.event(), agent.agent.runtime.now() + 0.001)
    assert Shared.while_running["agent.num_idle_threads"] == "15"
    assert agent.get_metrics()["agent.client_active_calls"] == "1"
    Shared.future.set_result(3)
    assert future.wait() == 3
    while agent.get_metrics() != idle:  # the call stays active for a moment after its reply
        agent.agent.executor.wait(agent.agent.runtime.event(), agent.agent.runtime.now() + 0.001)


def test_an_agent_must_implement_the_interface() -> None:
    with pytest.raises(TypeError, match="abstract"):
        rpc.RpcAgent()  # type: ignore[abstract]  # the error is the point


@pytest.mark.usefixtures("agents")
def test_membership_notices_from_other_workers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="the others learn about it from its connections"):
        _utils._update_group_membership(rpc.get_worker_info("b"), [], {}, True)
