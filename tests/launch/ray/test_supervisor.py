"""`telegrad.launch.ray.supervisor` with actors that only exist in the test, and end when it says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from telegrad.errors import WorkerLost
from telegrad.launch.process_exit import ProcessId
from telegrad.launch.ray import supervisor as module
from telegrad.launch.ray.outcome import Outcome, Place
from telegrad.launch.ray.supervisor import Supervisor
from telegrad.launch.restarts import RestartPolicy
from telegrad.launch.worker_result import capture

PLACE = Place("node", "192.0.2.1", ProcessId("machine", 4711, 1))


def returned(value: object) -> Outcome:
    return Outcome(cloudpickle.dumps(value))


def raised(error: Exception) -> Outcome:
    return Outcome(exception=capture(error))


class FakeActor:
    def __init__(self, ended: Callable[[Outcome], None]) -> None:
        self.end = ended
        self.killed = False

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            self.end(Outcome(death="killed"))

    def finish(self, place: Place | None, died: bool, gone: Callable[[], None]) -> None:
        self.killed = True
        gone()


class FakeRay:
    """Starts actors that do what `script` says when they start: by rank and restart."""

    def __init__(self, script: Callable[[FakeRay, FakeActor, int, int], None], starts: bool = True) -> None:
        self._script = script
        self._starts = starts
        self.actors: dict[int, FakeActor] = {}
        self.started: list[tuple[int, int]] = []
        self.stop_requests = 0

    def start(
        self, rank: int, restart: int, started: Callable[[Place], None], ended: Callable[[Outcome], None]
    ) -> FakeActor:
        self.started.append((rank, restart))
        self.actors[rank] = FakeActor(ended)
        if self._starts:
            started(PLACE)
        self._script(self, self.actors[rank], rank, restart)
        return self.actors[rank]

    def request_stop(self) -> None:
        self.stop_requests += 1
        for actor in self.actors.values():
            actor.end(raised(SystemExit(1)))  # type: ignore[arg-type]  # any exception


def run(ray: FakeRay, limit: int = 0, **options: Any) -> Supervisor:
    policy = RestartPolicy(limit, first_delay=0.001, max_delay=0.001)
    supervised = Supervisor(["a", "b"], ray, policy, **options)
    supervised.start()
    supervised.run()
    return supervised


def test_results_are_those_of_the_actors() -> None:
    found = run(FakeRay(lambda ray, actor, rank, restart: actor.end(returned(rank))))
    assert [worker.result.value() for worker in found.workers.values()] == [0, 1]
    assert [worker.pid for worker in found.workers.values()] == [4711, 4711]
    assert not found.failures


def test_a_failure_stops_the_others() -> None:
    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        if rank == 1:
            actor.end(raised(ValueError("x")))

    ray = FakeRay(script)
    found = run(ray)
    assert [(failure.worker.name, failure.description) for failure in found.failures] == [("b", "raised ValueError: x")]
    assert ray.stop_requests == 1
    assert found.stop_signal is None


def test_with_keep_going_a_failure_does_not_stop_the_others() -> None:
    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        actor.end(raised(ValueError("x")) if rank == 0 else returned(1))

    ray = FakeRay(script)
    found = run(ray, keep_going=True)
    assert found.failures[0].worker.name == "a"
    assert found.workers["b"].succeeded()
    assert ray.stop_requests == 0


def test_a_worker_that_dies_is_started_again_as_often_as_allowed() -> None:
    said: list[str] = []

    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        actor.end(returned("a") if rank == 0 else Outcome(death="End of file."))

    ray = FakeRay(script)
    found = run(ray, limit=2, report=said.append)
    assert ray.started == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert found.failures[0].description == (
        "died before its function returned: End of file. (after 2 restarts within 300 s)"
    )
    assert said[1] == (
        "b died before its function returned: End of file.; started again (2 of 2 restarts within 300 s)"
    )


def test_a_start_on_a_node_that_is_dead_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.001)

    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        lost = rank == 1 and restart < 3
        actor.end(Outcome(death="its node has died", node_lost=True) if lost else returned(rank))

    ray = FakeRay(script, starts=False)
    found = run(ray)
    assert ray.started == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert not found.failures


def test_a_worker_whose_nodes_die_all_the_time_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.001)
    dead = Outcome(death="its node has died", node_lost=True)
    found = run(FakeRay(lambda ray, actor, rank, restart: actor.end(dead), starts=False), start_within=0.05)
    assert found.failures[0].description == "died before its function returned: its node has died"


def test_the_dead_node_is_named_though_the_limit_cuts_off_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.001)

    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        if restart == 0:
            actor.end(Outcome(death="its node has died", node_lost=True))

    ray = FakeRay(script, starts=False)
    found = run(ray, start_within=0.05)
    assert set(ray.started) == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert found.failures[0].description == "died before its function returned: its node has died"


def test_a_second_stop_kills_at_once() -> None:
    ray = FakeRay(lambda ray, actor, rank, restart: None)
    ray.request_stop = lambda: None  # type: ignore[method-assign]  # the workers do not listen
    supervised = Supervisor(["a", "b"], ray, RestartPolicy(), grace=1000.0)
    supervised.start()
    supervised.stop()
    supervised.stop()
    supervised.run()
    assert [actor.killed for actor in ray.actors.values()] == [True, True]


def test_the_cause_is_named_though_ray_reports_it_later() -> None:
    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        if rank == 1:
            ray.actors[0].end(raised(WorkerLost("b is lost", worker="b")))
            threading.Timer(0.05, actor.end, (Outcome(death="its node has died"),)).start()

    found = run(FakeRay(script))
    assert [failure.worker.name for failure in found.failures] == ["b"]


def test_a_worker_is_judged_though_the_one_that_it_lost_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NOTICED_WITHIN", 0.02)

    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        if rank == 1:
            ray.actors[0].end(raised(WorkerLost("b is lost", worker="b")))

    found = run(FakeRay(script))
    assert [failure.worker.name for failure in found.failures] == ["a"]


def test_a_worker_that_ray_cannot_place_has_failed() -> None:
    found = run(FakeRay(lambda ray, actor, rank, restart: None, starts=False), start_within=0.01)
    assert "Ray did not start it within 0.01 s" in found.failures[0].description


def test_a_stop_ends_workers_that_do_not_listen() -> None:
    class Deaf(FakeRay):
        def request_stop(self) -> None:
            self.stop_requests += 1

    ray = Deaf(lambda ray, actor, rank, restart: None)
    supervised = Supervisor(["a", "b"], ray, RestartPolicy(3), grace=0.01)
    supervised.start()
    supervised.stop()
    supervised.run()
    assert [actor.killed for actor in ray.actors.values()] == [True, True]
    assert supervised.stop_signal is not None
    assert ray.started == [(0, 0), (1, 0)]


def test_a_stop_ends_though_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GIVE_UP", 0.01)

    class Silent(FakeRay):
        def request_stop(self) -> None:
            for actor in self.actors.values():
                actor.killed = True  # so that killing it tells nobody

    supervised = Supervisor(["a", "b"], Silent(lambda *unused: None), RestartPolicy(), grace=0.01)
    supervised.start()
    supervised.stop()
    supervised.run()
    assert not any(worker.succeeded() for worker in supervised.workers.values())


def test_a_worker_killed_on_purpose_is_no_failure() -> None:
    def script(ray: FakeRay, actor: FakeActor, rank: int, restart: int) -> None:
        if rank == 0:
            actor.end(returned("a"))

    supervised = Supervisor(["a", "b"], FakeRay(script), RestartPolicy())
    supervised.start()
    supervised.workers["b"].killed_on_purpose = True
    supervised.workers["b"].kill()
    supervised.run()
    assert not supervised.failures
    assert supervised.workers["b"].exitcode == -9
