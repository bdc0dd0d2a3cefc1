"""Spinning before sleeping: only after short waits, and only while no other thread needs the processor."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.transport import spinning
from telegrad.transport.spinning import Spin

LIMIT = 400
FOUND = [(1, 1)]


class World:
    """A virtual clock, and a poll function that finds something at a set time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.ready_at = 0.0
        self.polls = 0
        self.sleeps = 0
        self.taken = 0.0
        monkeypatch.setattr(spinning, "monotonic", lambda: self.now)
        monkeypatch.setattr(spinning, "sched_yield", self._yield)

    def _yield(self) -> None:
        self.now += self.taken

    def poll(self, timeout: float | None) -> list[Any]:
        if timeout == 0:
            self.polls += 1
            self.now += 1e-6
        else:
            self.sleeps += 1
            self.now = max(self.now, self.ready_at) if timeout is None else min(self.ready_at, self.now + timeout)
        return FOUND if self.now >= self.ready_at else []

    def wait(self, spin: Spin, after: float, timeout: float | None = None) -> list[Any]:
        """Wait for something that is ready after this many seconds."""
        self.polls = self.sleeps = 0
        self.ready_at = self.now + after
        return spin.wait(self.poll, timeout)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_first_wait_sleeps_and_a_wait_after_a_short_one_spins(world: World) -> None:
    spin = Spin(LIMIT)
    assert world.wait(spin, after=100e-6) == FOUND
    assert (world.polls, world.sleeps) == (0, 1)
    assert world.wait(spin, after=100e-6) == FOUND
    assert world.polls >= 99
    assert world.sleeps == 0


def test_a_wait_spins_up_to_its_limit_and_then_sleeps(world: World) -> None:
    spin = Spin(LIMIT)
    world.wait(spin, after=100e-6)
    assert world.wait(spin, after=1.0) == FOUND
    assert 399 <= world.polls <= 401
    assert world.sleeps == 1


@pytest.mark.parametrize("after", [1.0, 500e-6])
def test_a_wait_after_a_long_one_sleeps_at_once(world: World, after: float) -> None:
    spin = Spin(LIMIT)
    world.wait(spin, after=100e-6)
    world.wait(spin, after=after)
    world.wait(spin, after=100e-6)
    assert (world.polls, world.sleeps) == (0, 1)


def test_a_thread_that_lost_its_processor_does_not_spin_for_a_while(world: World) -> None:
    spin = Spin(LIMIT)
    world.wait(spin, after=100e-6)
    world.taken = 0.003
    world.wait(spin, after=0.0031)
    assert (world.polls, world.sleeps) == (1, 1)
    world.wait(spin, after=100e-6)
    world.wait(spin, after=100e-6)
    assert (world.polls, world.sleeps) == (0, 1)
    world.now += 1.0
    world.taken = 0.0
    world.wait(spin, after=100e-6)
    assert world.sleeps == 0


def test_a_wait_ends_at_its_timeout(world: World) -> None:
    spin = Spin(LIMIT)
    assert world.wait(spin, after=10.0, timeout=1.0) == []
    world.wait(spin, after=100e-6)
    assert world.wait(spin, after=10.0, timeout=1.0) == []
    assert world.sleeps == 1


@pytest.mark.parametrize(("limit", "timeout"), [(0, 1.0), (LIMIT, 0)])
def test_without_spinning_or_time_there_is_one_poll(world: World, limit: int, timeout: float) -> None:
    spin = Spin(limit)
    for _ in range(3):
        world.wait(spin, after=0.0, timeout=timeout)
        assert world.polls + world.sleeps == 1
