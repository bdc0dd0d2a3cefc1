"""`telegrad.launch.ray.worker` without Ray: what a process is given, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tests.support.coordinator_thread import CoordinatorThread

from telegrad import rpc
from telegrad.launch.ray import membership, worker
from telegrad.launch.ray.membership import Membership
from telegrad.launch.ray.outcome import Outcome
from telegrad.launch.ray.store import close_store
from telegrad.launch.ray.worker import Startup, WorkerActor
from telegrad.launch.work import dump_work

TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


class Handle:
    """A handle of a coordinator that is never stopped."""

    def __init__(self, coordinator: CoordinatorThread) -> None:
        self.call = coordinator.call
        self.stopped = self

    def remote(self) -> Handle:
        return self

    def future(self) -> Future[None]:
        return Future()


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    coordinator = CoordinatorThread()
    monkeypatch.setattr(membership, "coordinator_call", lambda handle: handle.call)
    monkeypatch.setattr(worker, "report_metrics", lambda agent: None)
    before = dict(os.environ)
    yield Handle(coordinator)
    os.environ.clear()
    os.environ.update(before)
    close_store("key")
    coordinator.close()


def run(handle: Handle, function: Any, init: bool = False) -> Outcome:
    place = Membership("key", "alice", 0, 1, TOKEN, handle, restart=2)
    startup = Startup(place, dump_work(function, (), None), init)
    assert TOKEN not in repr(startup)
    return WorkerActor("alice").run(startup)


def test_the_function_finds_its_place_in_the_environment_but_not_the_token(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_TOKEN", "f" * 64)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    found = run(handle, lambda: dict(os.environ)).value()
    assert (found["TELEGRAD_NAME"], found["RANK"], found["WORLD_SIZE"]) == ("alice", "0", "1")
    assert (found["TELEGRAD_RESTART"], found["TELEGRAD_INIT_METHOD"]) == ("2", "ray:///key")
    assert "MASTER_ADDR" not in found
    assert not [name for name in found if name.startswith("TELEGRAD_TOKEN")]


@pytest.mark.parametrize("init", [True, False])
def test_init_rpc_needs_no_arguments(handle: Handle, init: bool) -> None:
    def work() -> str:
        if not init:
            rpc.init_rpc()
        name = rpc.get_worker_info().name
        if not init:
            rpc.shutdown()
        return name

    assert run(handle, work, init).value() == "alice"


def test_an_exception_has_a_traceback_that_begins_in_the_function(handle: Handle) -> None:
    def work() -> None:
        raise LookupError("x")

    found = run(handle, work)
    assert found.is_error()
    assert found.raised().summary == "LookupError: x"
    assert "launch/ray/worker.py" not in found.raised().traceback


def test_ray_prints_output_with_the_name_of_the_worker() -> None:
    assert repr(WorkerActor("alice")) == "alice"
