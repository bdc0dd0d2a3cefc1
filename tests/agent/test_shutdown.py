"""How a worker leaves: what it still does for those that were killed, and for those that wait for its answers."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import Any

import pytest

from telegrad.agent.shutdown import Shutdown
from telegrad.connection.peer_table import Peer
from telegrad.errors import DeadlineExceeded, NotInitialized, ProtocolError, WorkerLost
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation
from telegrad.transport.memory import MemoryTransport

SEEDS = range(6)
PATIENCE = 30.0


class Listening:
    """Stands for the socket files of killed workers: they answer for some time after the connection has ended."""

    def __init__(self, seconds: float, patch: pytest.MonkeyPatch) -> None:
        self.seconds = seconds
        self.killed_at = math.inf
        self.asked = 0
        self.removed_at: float | None = None
        patch.setattr(MemoryTransport, "remove_dead", self.remove_dead)

    def run(self, seed: int, pause: float = 0.0) -> float:
        """Kill one of three workers that another has called, which then leaves; say how long leaving took."""
        sim = self.sim = Simulation(seed, ["a", "b", "c"], resumable=False)

        def program() -> float:
            call = sim["a"].begin("b", abs, (-1,))
            self.killed_at = sim.scheduler.now
            sim.kill("b")
            with pytest.raises(WorkerLost):
                sim["a"].client.complete(call)
            sim.sleep(pause)
            began = sim.scheduler.now
            sim.agents.pop("a").close()
            return sim.scheduler.now - began

        with sim:
            return sim.run(program)

    def remove_dead(self, address: str) -> bool:
        assert address == "memory://b"
        self.asked += 1
        if self.sim.scheduler.now < self.killed_at + self.seconds:
            return False
        self.removed_at = self.removed_at or self.sim.scheduler.now
        return True


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_leaves_right_after_a_death_removes_what_the_dead_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Listening(0.3, monkeypatch)
    took = files.run(seed)
    assert files.removed_at is not None
    assert took < 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_worker_that_lives_on_delays_nobody_for_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Listening(math.inf, monkeypatch)
    assert files.run(seed) < 1.5
    assert files.asked < 20
    assert files.run(seed, pause=5.0) < 0.1


def test_a_call_counts_as_under_way_until_its_answer_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a worker that leaves when all is quiet would keep the answer to itself."""
    with local_group(["a", "b"]) as group:
        b = group["b"]
        pack, seen = b.pipeline.pack, []

        def look_and_pack(*args: Any, **kwargs: Any) -> Any:
            seen.append(b.activity())
            return pack(*args, **kwargs)

        monkeypatch.setattr(b.pipeline, "pack", look_and_pack)
        assert group["a"].call("b", abs, (-1,)) == 1
        assert [len(activity) for activity in seen] == [1]
        deadline = time.monotonic() + 20
        while b.activity():
            assert time.monotonic() < deadline


def test_a_shutdown_that_began_during_a_call_does_not_look_for_calls_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that only serves is always in a shutdown, and most calls come after the one that it began in."""
    looked: list[bool] = []
    ended = Shutdown.activity_ended

    def look(self: Shutdown) -> None:
        looked.append(True)
        ended(self)

    monkeypatch.setattr(Shutdown, "activity_ended", look)
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            sim["b"].register("sleep", lambda: sim.sleep(5))
            slow = sim["a"].begin("b", "@sleep")
            sim.sleep(1)
            sim.spawn("b", sim["b"].shutdown)
            sim.sleep(1)
            assert sim["a"].call("b", abs, (-1,)) == 1
            assert looked  # one call has ended, and another has not
            sim["a"].client.complete(slow)
            sim.sleep(1)
            looked.clear()
            for _ in range(3):
                assert sim["a"].call("b", abs, (-1,)) == 1
            assert not looked
            sim["a"].shutdown()

        sim.run(program)


def test_who_does_not_want_to_wait_ends_the_shutdown_of_another_thread() -> None:
    with Simulation(1, ["a", "b"]) as sim:
        errors: list[BaseException] = []

        def leave() -> None:
            try:
                sim["a"].shutdown()
            except NotInitialized as error:
                errors.append(error)

        def program() -> None:
            sim.spawn("a", leave)
            sim.sleep(5)
            agent = sim["a"]
            with pytest.raises(DeadlineExceeded, match=r"another thread is in shutdown\(\), and waits for the other"):
                agent.shutdown(timeout=3)
            agent.shutdown(graceful=False)
            assert agent.closed
            sim.sleep(1)

        sim.run(program)
    assert [str(error) for error in errors] == ["worker 'a' cannot take part in a shutdown: it has been shut down"]


def test_the_error_of_a_worker_that_was_replaced_is_not_the_cause_of_what_follows() -> None:
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            protocol = sim["a"].shutdown_protocol
            assert sim["a"].call("b", abs, (-1,)) == 1
            left = sim["b"]
            left.shutdown_protocol.note_cause(ValueError("no such file"))
            left.close()
            sim.sleep(2)
            assert protocol.first_cause == "worker 'b' ended with ValueError: no such file"
            sim.kill("b")
            sim.restart("b")
            assert protocol.first_cause == ""
            assert sim["a"].call("b", abs, (-1,)) == 1
            left = sim["b"]
            left.shutdown_protocol.note_cause(OSError("disk full"))
            left.close()
            sim.sleep(2)
            assert protocol.first_cause == "worker 'b' ended with OSError: disk full"

        sim.run(program)


def test_a_closed_agent_can_be_shut_down_any_number_of_times() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            agent = sim["a"]
            agent.close()
            for graceful in (True, False, True):
                agent.shutdown(graceful=graceful, timeout=5)

        sim.run(program)


def test_a_signal_handler_may_end_the_shutdown_that_it_interrupts() -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def program() -> None:
            agent = sim["a"]
            drain = agent.shutdown_protocol._drain

            def interrupted(timeout: float) -> list[str]:
                agent.shutdown(timeout=5)  # waits for nothing: this thread is in shutdown() already
                agent.shutdown(graceful=False)
                return drain(timeout)

            agent.shutdown_protocol._drain = interrupted  # type: ignore[method-assign]
            with pytest.raises(NotInitialized, match="it has been shut down"):
                agent.shutdown()

        sim.run(program)


def test_a_callback_that_still_runs_is_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    started, release = threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        started.set()
        assert release.wait(PATIENCE)

    with local_group(["a"], settings=AgentSettings(stop_timeout=0.1)) as agents:
        agents["a"].executor.submit(wait_for_ever)
        assert started.wait(PATIENCE)
        agents["a"].close()
        release.set()
    said = [record.getMessage() for record in caplog.records if "still running" in record.getMessage()]
    assert len(said) == 1
    assert "worker 'a' shut down while functions were still running: test_a_callback_that_still_runs_" in said[0]
    assert ".<locals>.wait_for_ever (test_shutdown.py:" in said[0]


@pytest.mark.parametrize("limited", ["a", "b", "d"])
def test_the_timeout_of_a_shutdown_is_that_of_one_worker_whoever_came_first(limited: str) -> None:
    """Here e comes late. The root, an inner worker or a leaf gives up before, and the others wait on."""
    names, ended = ["a", "b", "c", "d", "e"], {}

    with Simulation(1, names, settings=AgentSettings(fan_out=2)) as sim:

        def leave(name: str, after: float, timeout: float) -> None:
            sim.sleep(after)
            try:
                sim[name].shutdown(timeout=timeout)
                ended[name] = (sim.scheduler.now, "")
            except DeadlineExceeded as error:
                ended[name] = (sim.scheduler.now, str(error))

        def program() -> None:
            threads = [
                sim.spawn(name, lambda name=name: leave(name, 30.0 if name == "e" else 0.0, 0.0))
                for name in names
                if name != limited
            ]
            threads.append(sim.spawn(limited, lambda: leave(limited, 1.0, 5.0)))
            for thread in threads:
                assert thread.join(100.0), f"{thread.node} still waits"

        sim.run(program)
    when, error = ended.pop(limited)
    assert (round(when), error) == (6, "after 5 s worker 'e' has not called shutdown()")
    assert {error for _, error in ended.values()} == {""}
    assert all(30.0 <= when < 40.0 for when, _ in ended.values())


def test_a_worker_whose_time_is_up_blames_a_root_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Simulation(1, ["a", "b"]) as sim:

        def refuse(key: object, *, up: bool) -> list[str]:
            raise ProtocolError("test")

        def program() -> None:
            monkeypatch.setattr(sim["a"].collectives, "_whom", refuse)
            with pytest.raises(DeadlineExceeded, match=r"after 3 s worker 'a' has not called shutdown\(\)"):
                sim["b"].shutdown(timeout=3)

        sim.run(program)


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_others_have_lost_ends_so_that_its_launcher_starts_it_again(name: str, seed: int) -> None:
    """The others wait for its replacement, which the launcher starts when the process has ended."""
    sim = Simulation(seed, ["a", "b", "c"], settings=AgentSettings(awaited_replacement=60.0))
    raised: list[str] = []

    def leave(who: str) -> None:
        try:
            sim[who].shutdown(graceful=True, timeout=200.0)
        except WorkerLost as error:
            raised.append(f"{who}: {error}")

    def program() -> None:
        for caller in "abc":
            for callee in "abc":
                sim[caller].call(callee, abs, (-1,))
        others = [each for each in "abc" if each != name]
        leaving = sim.spawn(name, partial(leave, name))
        sim.sleep(1)
        for other in others:
            peers = sim[other].peers
            peers.lost_workers.peer_lost(peers.find(name), "it was stopped for too long")
        leaving.join(sim.scheduler.now + 10)
        assert [text.split(" (")[0] for text in raised] in [
            [f"{name}: worker {name!r} ends, so that its launcher starts it again: worker {other!r} has lost it"]
            for other in others
        ]
        sim.kill(name)
        sim.restart(name)
        for thread in [sim.spawn(each, partial(leave, each)) for each in "abc"]:
            thread.join(None)
        assert len(raised) == 1

    with sim:
        sim.run(program)


@pytest.mark.parametrize(("name", "other"), [("a", "c"), ("b", "a"), ("b", "c"), ("c", "b")])
def test_a_worker_that_one_has_lost_ends_whomever_it_waits_for(name: str, other: str) -> None:
    """The one that has lost it may run a training, and wait for its replacement, while the root has not lost it."""
    sim = Simulation(1, ["a", "b", "c"], settings=AgentSettings(awaited_replacement=60.0))

    def program() -> None:
        for caller in "abc":
            for callee in "abc":
                sim[caller].call(callee, abs, (-1,))

        def lose() -> None:
            sim.sleep(1)
            peers = sim[other].peers
            peers.lost_workers.peer_lost(peers.find(name), "it was stopped for too long")

        losing = sim.spawn(other, lose)
        began = sim.scheduler.now
        with pytest.raises(WorkerLost, match=f"worker {name!r} ends, so that its launcher starts it again"):
            sim[name].shutdown(graceful=True, timeout=200.0)
        losing.join(None)
        assert sim.scheduler.now < began + 10

    with sim:
        sim.run(program)


def test_a_worker_that_is_given_up_while_it_calls_its_root_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation(1, ["a", "b", "c"], settings=AgentSettings(awaited_replacement=60.0))

    def program() -> None:
        tree, lost_workers = sim["b"].collectives.shutdown_rounds.tree, sim["b"].peers.lost_workers
        above, other = tree.above, sim["b"].peers.find("c")

        def above_and_given_up(target: Peer) -> int:
            lost_workers.given_up(other, "it was stopped for too long")
            return above(target)

        monkeypatch.setattr(tree, "above", above_and_given_up)
        with pytest.raises(WorkerLost, match="worker 'c' has lost it"):
            sim["b"].shutdown(graceful=True, timeout=200.0)
        assert sim.scheduler.now < 10

    with sim:
        sim.run(program)


def test_one_worker_alone_does_not_end_another_where_nobody_trusts_anybody() -> None:
    settings = AgentSettings(awaited_replacement=60.0, accept="registered")
    sim = Simulation(1, ["a", "b", "c", "d"], settings=settings)

    def program() -> None:
        victim = sim["b"].peers
        for name in "ddd":
            victim.lost_workers.given_up(victim.find(name), "so it says")
        assert sim["b"].local.given_up is None
        victim.lost_workers.given_up(victim.find("a"), "it was stopped for too long")
        assert sim["b"].local.given_up is not None

    with sim:
        sim.run(program)


def test_a_worker_that_another_has_lost_stays_if_nobody_starts_it_again() -> None:
    sim = Simulation(1, ["a", "b", "c"])

    def program() -> None:
        for caller in "abc":
            for callee in "abc":
                sim[caller].call(callee, abs, (-1,))
        peers = sim["a"].peers
        peers.lost_workers.peer_lost(peers.find("b"), "it was stopped for too long")
        sim.sleep(1)
        assert sim["b"].local.given_up is None
        assert sim["c"].call("b", abs, (-1,)) == 1

    with sim:
        sim.run(program)
