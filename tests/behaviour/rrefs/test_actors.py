"""Ordered actors, and references held at shutdown."""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.rrefs import PATIENCE, Group, becomes_true

from telegrad import rpc
from telegrad.default_agent import acting_as
from telegrad.errors import CallCancelled, DeadlineExceeded, PayloadError, ReferencesHeld
from telegrad.protocol.limits import SessionSettings
from telegrad.rref.handle import RRef
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation


class Actor:
    gate = threading.Event()

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.inside = 0

    def note(self, what: object, ballast: bytes = b"") -> None:
        self.inside += 1
        assert self.inside == 1, "two at a time"
        self.log.append(what)
        self.inside -= 1

    async def note_later(self, what: object) -> None:
        self.inside += 1
        assert self.inside == 1, "two at a time"
        for _ in range(3):
            await asyncio.sleep(0)
        self.log.append(what)
        self.inside -= 1

    @rpc.functions.async_execution
    def note_elsewhere(self, what: object) -> torch.futures.Future[Any]:
        self.note(what)
        return rpc.rpc_async("c", abs, (-1,))

    def fail(self) -> None:
        raise LookupError("on purpose")

    def hold(self) -> None:
        assert self.gate.wait(PATIENCE)
        self.log.append("held")

    def read(self) -> list[Any]:
        return self.log


class Unreadable:
    """Can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be rebuilt")


def note_many(rref: RRef[Actor], who: str) -> None:
    for number in range(20):
        rref.rpc_async().note((who, number), bytes(200_000 * (number % 2)))
    rref.rpc_sync().note((who, 20))


@pytest.mark.parametrize("owner", ["a", "b"])
def test_calls_run_in_the_callers_order(group: Group, owner: str) -> None:
    rref = rpc.remote(owner, Actor, ordered=True)
    futures = []
    for number in range(30):
        proxy = rref.rpc_async()
        if number % 3 == 0:
            futures.append(proxy.note(number, bytes(300_000)))
        elif number % 3 == 1:
            futures.append(proxy.note_later(number))
        else:
            futures.append(proxy.note_elsewhere(number))
    assert rref.rpc_sync().read() == list(range(30))
    for future in futures:
        future.wait()


def test_each_caller_has_its_own_order(group: Group) -> None:
    rref = rpc.remote("b", Actor, ordered=True)
    callers = [rpc.rpc_async(name, note_many, (rref, name)) for name in "abc"]
    for caller in callers:
        caller.wait()
    log = rref.rpc_sync().read()
    for name in "abc":
        assert [number for who, number in log if who == name] == list(range(21))


def test_exceptions_skipped_and_undecodable_calls_do_not_stall_the_queue(group: Group) -> None:
    rref = rpc.remote("b", Actor, ordered=True)
    with pytest.raises(PayloadError):
        rref.rpc_sync().note(threading.Lock())
    with pytest.raises(PayloadError, match="cannot be unpickled"):
        rref.rpc_sync().note(Unreadable())
    failing = rref.rpc_async().fail()
    later = rref.rpc_async().note("after")
    with pytest.raises(LookupError):
        failing.wait()
    later.wait()
    with pytest.raises(AttributeError):
        rref.rpc_sync().no_such_method()
    assert rref.rpc_sync().read() == ["after"]


def test_cancelled_and_timed_out_calls_do_not_stall_the_queue(group: Group) -> None:
    Actor.gate.clear()
    rref = rpc.remote("b", Actor, ordered=True)
    held = rref.rpc_async().hold()

    def has_cancelled() -> bool:
        return any(served.cancelled for served in group["b"].server.unanswered())

    for timeout in (0.02, 0.5, 5.0):  # until it had the time to arrive there
        with pytest.raises(DeadlineExceeded):
            rref.rpc_async(timeout=timeout).note("late").wait()
        if becomes_true(has_cancelled, patience=1.0):
            break
    cancelled = rref.rpc_async().note("cancelled")
    last = rref.rpc_async().note("last")
    assert cancelled.cancel()
    with pytest.raises(CallCancelled):
        cancelled.wait()
    assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3  # it came after what was sent before
    Actor.gate.set()
    held.wait()
    last.wait()
    assert rref.rpc_sync().read() == ["held", "last"]


def test_every_call_fails_when_the_actor_could_not_be_created(group: Group) -> None:
    rref = rpc.remote("b", Actor, (1, 2, 3), ordered=True)
    futures = [rref.rpc_async().note(number) for number in range(3)]
    for future in futures:
        with pytest.raises(TypeError):
            future.wait()


def test_calls_of_an_actor_that_is_gone_do_not_wait_for_calls_that_another_process_got(group: Group) -> None:
    # As when the owner was restarted: the reference came back from it, and earlier calls went to its predecessor.
    rref = rpc.remote("b", Actor, (1, 2, 3), ordered=True)
    references = group["a"].references
    references.sequencer.next(group["b"].me.id, rref._id)
    with pytest.raises(TypeError):
        rref.rpc_sync(timeout=PATIENCE).note(1)
    references.skip_call(group["b"].me.id, references.sequencer.next(group["b"].me.id, rref._id))
    with pytest.raises(TypeError):
        rref.rpc_sync(timeout=PATIENCE).note(2)
    [owned] = group["b"].references.context.values.values()
    assert owned.queue.sequence_count() == 0


def test_a_local_value_can_be_an_actor(group: Group) -> None:
    rref = RRef(Actor(), ordered=True)
    rpc.rpc_sync("b", note_many, (rref, "b"))
    assert [number for _, number in rref.rpc_sync().read()] == list(range(21))


def test_the_queue_forgets_callers_that_released_the_actor(group: Group) -> None:
    rref = rpc.remote("b", Actor, ordered=True)
    for _ in range(30):
        rpc.rpc_sync("c", note_once, (rref,))
    [owned] = group["b"].references.context.values.values()
    assert becomes_true(lambda: owned.queue.sequence_count() <= 1)
    assert len(rref.rpc_sync().read()) == 30


def note_once(rref: RRef[Actor]) -> None:
    rref.rpc_sync().note("once")


# -- shutdown ------------------------------------------------------------------------------------------------------


def leave_together(group: Group, **kwargs: Any) -> dict[str, Exception]:
    errors: dict[str, Exception] = {}

    def leave(name: str) -> None:
        try:
            group[name].shutdown(timeout=PATIENCE, **kwargs)
        except Exception as error:  # noqa: BLE001 - checked by the test
            errors[name] = error

    threads = [threading.Thread(target=leave, args=(name,)) for name in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_references_held_at_shutdown_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "telegrad")
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            rref = rpc.remote("b", Actor)
            rref.to_here()
        assert leave_together(agents) == {}
    lines = [record.getMessage() for record in caplog.records if "references held" in record.getMessage()]
    assert sorted(lines) == [
        "worker 'a' shut down with references held: reference 0:0 of worker 'b' is held here",
        "worker 'b' shut down with references held: reference 0:0, a Actor of this worker, is held by 'a'",
    ]


def test_references_held_at_a_strict_shutdown_raise() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            rref = rpc.remote("b", Actor)
            rref.to_here()
        errors = leave_together(agents, strict_references=True)
        assert {name: type(error) for name, error in errors.items()} == {"a": ReferencesHeld, "b": ReferencesHeld}
        assert "reference 0:0 of worker 'b' is held here" in str(errors["a"])
        assert all(agent.closed for agent in agents.values())


def test_references_dropped_just_before_a_strict_shutdown_are_not_reported() -> None:
    for _ in range(5):
        with local_group(["a", "b", "c"]) as agents:
            with acting_as(agents["a"]):
                rrefs = [rpc.remote(name, Actor) for name in "abc" * 5]
                rpc.rpc_sync("c", len, (rrefs,))
                del rrefs
            assert leave_together(agents, strict_references=True) == {}


@pytest.mark.parametrize("seed", range(5))
def test_calls_of_many_threads_do_not_wait_for_credits_that_later_calls_hold(seed: int) -> None:
    settings = AgentSettings(session=SessionSettings(request_credits=2))
    with Simulation(seed, ["a", "b"], settings=settings) as sim:

        def program() -> list[Any]:
            with acting_as(sim["a"]):
                rref = rpc.remote("b", Actor, ordered=True)

                def call(thread: int) -> None:
                    for number in range(5):
                        rref.rpc_sync(timeout=0).note((thread, number))

                end = sim["a"].runtime.now() + 60.0
                for thread in [sim.spawn("a", partial(call, number)) for number in range(6)]:
                    assert thread.join(end)
                return rref.rpc_sync().read()  # type: ignore[no-any-return]

        log = sim.run(program)
    assert len(log) == 30
    for thread in range(6):
        assert [number for who, number in log if who == thread] == list(range(5))
