"""Random programs that create, send, use and drop references, on a faulty network and with killed workers.

At the end every value has been freed, and no thread hangs.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import CallError, NotInitialized, ReferenceGone, WorkerLost
from telegrad.rref.handle import RRef
from telegrad.testing.simulation import Faults, Simulation

Handle = RRef[Any]


class Box:
    """A value with methods that may hold references."""

    def __init__(self, content: object = None) -> None:
        self.content = content
        self.log: list[int] = []

    def get(self) -> object:
        return self.content

    def inside(self) -> Box:
        return Box(self.content)

    def put(self, content: object) -> None:
        self.content = content

    def note(self, number: int, ballast: bytes) -> int:
        self.log.append(number)
        return number

    async def later(self, number: int) -> int:
        return number

    def fail(self) -> None:
        raise LookupError("on purpose")


def make_box(*handles: Handle) -> Box:
    return Box(list(handles))


def make_failing() -> Box:
    raise LookupError("on purpose")


def pass_along(way: list[str], handles: list[Handle]) -> list[Handle]:
    """Send references through workers, and return handles of the same values."""
    if way:
        return rpc.rpc_sync(way[0], pass_along, (way[1:], handles))  # type: ignore[no-any-return]
    return handles


def use(handle: Handle) -> None:
    """Use a reference that arrived in a call, which is settled before the function runs."""
    assert handle._user is None or handle._user.settled, "a function runs with a reference that is not confirmed"
    handle.rpc_sync().get()


class RandomProgram:
    """The random actions of one worker."""

    def __init__(self, sim: Simulation, names: list[str], name: str, counts: Counter[str]) -> None:
        self.sim, self.names, self.name, self.counts = sim, names, name, counts
        self.draw = sim.random
        self.mine: list[Handle] = []

    def run(self) -> None:
        for _ in range(self.draw.randint(3, 6)):
            try:
                self.step()
            except (WorkerLost, ReferenceGone, NotInitialized) as error:
                self.counts[type(error).__name__] += 1
            except CallError as error:
                self.counts[type(error).__name__] += 1
            except LookupError:
                self.counts["errors"] += 1
            if self.mine and self.draw.random() < 0.4:
                self.mine.pop(self.draw.randrange(len(self.mine)))
        self.mine.clear()

    def step(self) -> None:
        draw, to = self.draw, self.draw.choice(self.names)
        size = draw.choice([0, 0, 100, 200_000])
        step = draw.randrange(9)
        if not self.mine or step == 0:
            self.mine.append(rpc.remote(to, make_box, tuple(self.mine[:2]), ordered=draw.random() < 0.3))
            self.counts["made"] += 1
            return
        handle = draw.choice(self.mine)
        if step == 1:
            self.mine.append(RRef(Box(), ordered=draw.random() < 0.3))
        elif step == 2:
            way = [draw.choice(self.names) for _ in range(draw.randint(0, 3))]
            self.mine += rpc.rpc_sync(to, pass_along, (way, [handle, handle]))[:1]
            self.counts["passed"] += 1
        elif step == 3:
            rpc.rpc_sync(to, use, (handle,))
        elif step == 4:
            futures = [handle.rpc_async().note(number, bytes(size * (number % 2))) for number in range(4)]
            for future in futures:
                future.wait()
        elif step == 5:
            self.mine.append(handle.remote().inside())
        elif step == 6:
            handle.rpc_sync().put(RRef(Box()))
        elif step == 7:
            handle.rpc_sync(timeout=draw.choice([0.004, 0.0])).later(7)
            handle.to_here()
        else:
            failing = rpc.remote(to, make_failing)
            self.mine.append(failing)
            self.counts["failing"] += 1
            failing.to_here()


def _one_seed(seed: int) -> Counter[str]:
    faults = Faults()
    sim = Simulation(seed, names := [f"w{i}" for i in range(3 + seed % 4)], faults=faults, resumable=seed % 5 != 0)
    draw = sim.random
    faults.drop, faults.duplicate, faults.cut = draw.choice([(0, 0, 0), (0.01, 0.02, 0.01), (0, 0.1, 0.03)])
    killed = draw.random() < 0.3
    counts: Counter[str] = Counter()

    def program() -> None:
        programs = {name: RandomProgram(sim, names, name, counts) for name in names}
        threads = [sim.spawn(name, running.run) for name, running in programs.items()]
        if killed:
            sim.sleep(draw.uniform(0.0, 0.05))
            victim = draw.choice(names)
            doomed = sim[victim]
            sim.kill(victim)
            threads = [thread for thread in threads if thread.node != victim]
            programs.pop(victim).mine.clear()
            counts["killed"] += 1
            del doomed
        for thread in threads:
            assert thread.join(sim.scheduler.now + 600), f"{thread.node} hangs:\n{sim.scheduler.stacks()}"
        if sim.scheduler.errors:
            return  # raised at the end of sim.run
        programs.clear()
        for attempt in range(60):
            if attempt in (1, 10, 30):
                gc.collect()  # finished calls and exceptions may be in cycles
            sim.sleep(1.0)
            left = {name: agent.references.counts() for name, agent in sim.agents.items()}
            busy = [line for agent in sim.agents.values() for line in agent.activity()]
            if not busy and not any(any(count.values()) for count in left.values()):
                return
        lists = [line for agent in sim.agents.values() for line in agent.references.held()]
        pytest.fail(f"left behind: {left}; {busy}; {lists}")

    with sim:
        sim.run(program)
    counts.update(sim.network.counts)
    return counts


@pytest.fixture
def quiet() -> Iterator[None]:
    """Disable logging: pytest keeps logged exceptions, with their frames and the references in them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("block", range(12))
def test_every_value_is_freed_at_the_end(block: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(block * 25, block * 25 + 25):
        try:
            total.update(_one_seed(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert total["made"] > 50
    assert total["passed"] > 10
    assert total["failing"] > 0
    assert total["killed"] > 0
    assert total["cuts"] > 0
    assert total["repeated"] > 0
