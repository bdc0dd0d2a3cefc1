"""Gradients of contexts are installed for one step at a time, in the order of asking, and restored after errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.support.one_process import Group, leaf

from telegrad import autograd, rpc
from telegrad.backward.grad_swap import FairLock
from telegrad.errors import DeadlineExceeded, TelegradError
from telegrad.testing.simulation import Simulation


@contextmanager
def taken(lock: FairLock) -> Iterator[None]:
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@pytest.mark.parametrize("seed", range(10))
def test_the_lock_is_granted_to_one_thread_at_a_time_in_the_order_of_asking(seed: int) -> None:
    sim = Simulation(seed, ["a"])
    asked: list[int] = []
    had: list[int] = []
    inside: list[int] = []

    def take(lock: FairLock, number: int) -> None:
        sim.sleep(sim.random.uniform(0, 0.1))
        asked.append(number)
        with taken(lock):
            inside.append(number)
            assert len(inside) == 1
            sim.sleep(sim.random.uniform(0, 0.1))
            inside.remove(number)
            had.append(number)

    def program() -> None:
        lock = FairLock(sim["a"])
        threads = [sim.spawn("a", lambda n=number: take(lock, n)) for number in range(8)]
        for thread in threads:
            assert thread.join(sim.scheduler.now + 60), sim.scheduler.stacks()

    with sim:
        sim.run(program)
    assert had == asked
    assert len(had) == 8


def hold(seconds: float) -> str:
    sim, lock = shared
    with taken(lock):
        sim.sleep(seconds)
    return "held"


shared: tuple[Simulation, FairLock]


def test_a_call_past_its_deadline_stops_waiting_for_the_lock_and_others_get_it() -> None:
    global shared
    sim = Simulation(1, ["a", "b"])
    ends: dict[str, object] = {}

    def call(name: str, timeout: float) -> None:
        try:
            ends[name] = rpc.rpc_sync("b", hold, (1.0,), timeout=timeout)
        except DeadlineExceeded as error:
            ends[name] = error

    def program() -> None:
        global shared
        shared = sim, FairLock(sim["b"])
        threads = []
        for name, timeout in (("first", 10.0), ("late", 0.5), ("last", 10.0)):
            threads.append(sim.spawn("a", lambda n=name, t=timeout: call(n, t)))
            sim.sleep(0.1)
        for thread in threads:
            assert thread.join(sim.scheduler.now + 60), sim.scheduler.stacks()
        assert sim.scheduler.now < 5

    with sim:
        sim.run(program)
    assert ends.pop("first") == ends.pop("last") == "held"
    assert isinstance(ends.pop("late"), DeadlineExceeded)


def test_grad_is_restored_when_the_step_fails(group: Group) -> None:
    x = leaf(3)
    x.grad = own = torch.ones(3, dtype=torch.double)
    swap = group["a"].autograd.grad_swap.for_leaves([x])
    seen = []

    def fail(context: int) -> None:
        with swap.installed(context):
            seen.append(x.grad)
            raise ZeroDivisionError

    with autograd.context() as context:
        context.backward((2 * x).sum())
        with pytest.raises(ZeroDivisionError):
            fail(context)
        assert seen.pop() is context.gradients[x]
        assert x.grad is own
        with swap.installed(context):  # the lock and the slots are free again
            assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_changes_of_grad_during_a_step_are_kept_in_the_context(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    swap = group["a"].autograd.grad_swap.for_leaves([x, y])
    with autograd.context() as context:
        context.backward((2 * x).sum())
        with swap.installed(context):
            assert y.grad is None
            x.grad, y.grad = None, torch.ones(3, dtype=torch.double)
        assert x.grad is y.grad is None
        assert context.gradients.keys() == {y}


def test_gradients_of_a_context_that_was_left_cannot_be_installed(group: Group) -> None:
    x = leaf(3)
    swap = group["a"].autograd.grad_swap.for_leaves([x])
    with autograd.context() as context:
        pass
    with pytest.raises(TelegradError, match="has been left"), swap.installed(context):
        raise AssertionError("this must not run")
