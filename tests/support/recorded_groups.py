"""Views of made-up groups, whose true times are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from telegrad.observe.model import Event, GroupView, Kind, LiveCall, WorkerView


def worker_view(name: str, number: int = 0, **fields: object) -> WorkerView:
    """Return a view of a worker, with little in it."""
    values: dict[str, object] = {
        "incarnation": 100 + number,
        "generation": 0,
        "host": "here",
        "pid": 4000 + number,
        "addresses": (),
        "now": 0.0,
        "wall": 0.0,
        "started": 0.0,
    }
    return WorkerView(name=name, id=number, **{**values, **fields})  # type: ignore[arg-type] - all by name


@dataclass
class MadeUpGroup:
    """Workers that call each other at random. Each has its own clock, and the observer's estimates are a bit wrong."""

    seed: int
    workers: int = 3
    calls: int = 30
    error: float = 0.002
    shifts: list[float] = field(init=False)
    """What each worker's clock shows at true time 0."""
    true: dict[tuple[str, int], tuple[float, float, float, float]] = field(default_factory=dict)
    """By caller and number of a call: when it was really sent, arrived, answered, and ended."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shifts = [self.random.uniform(-1e6, 1e6) for _ in range(self.workers)]
        self.events: list[list[Event]] = [[] for _ in range(self.workers)]
        self.made: list[list[LiveCall]] = [[] for _ in range(self.workers)]
        self.served: list[list[LiveCall]] = [[] for _ in range(self.workers)]
        self.end = 1.0
        for number in range(self.calls):
            self._call(number)
        for number in range(self.calls // 3):
            self._gradient(number)

    def name(self, worker: int) -> str:
        return f"w{worker}"

    def _pair(self) -> tuple[int, int]:
        caller = self.random.randrange(self.workers)
        return caller, self.random.choice([worker for worker in range(self.workers) if worker != caller])

    def _times(self, count: int, longest: float = 0.01) -> list[float]:
        times = [self.random.uniform(0, self.end)]
        for _ in range(count - 1):
            times.append(times[-1] + self.random.choice([0.0, 1e-7, self.random.uniform(0, longest)]))
        return times

    def _call(self, number: int) -> None:
        caller, callee = self._pair()
        began, sent, arrived, started, computed, replied, ended = self._times(7)
        here, there = self.shifts[caller], self.shifts[callee]
        names = self.name(caller), self.name(callee)
        threads = self.random.randrange(3), self.random.randrange(3)
        if self.random.random() < 0.1:  # still open at the end
            live = (number, *names, "f")
            self.made[caller].append(LiveCall(*live, began + here, thread=threads[0]))
            self.served[callee].append(LiveCall(*live, arrived + there, state="running", thread=threads[1]))
            return
        self.true[names[0], number] = sent, arrived, replied, ended
        self._record(caller, Kind.CALL, began, ended, number, names[1], threads[0], (sent + here,))
        marks = (started + there, computed + there)
        self._record(callee, Kind.SERVE, arrived, replied, number, names[0], threads[1], marks)

    def _gradient(self, number: int) -> None:
        sender, receiver = self._pair()
        began, sent, arrived, next_began, ended = self._times(5)
        for worker, start, stop in ((sender, began, sent), (receiver, next_began, ended)):
            self._record(worker, Kind.ISLAND, start, stop, 0, "", 7, pass_id=5)
        self._record(sender, Kind.GRADIENT_SENT, sent, sent, number + 1, self.name(receiver), 7, pass_id=5)
        self._record(receiver, Kind.GRADIENT_ARRIVED, arrived, arrived, number + 1, self.name(sender), 7, pass_id=5)

    def _record(
        self,
        worker: int,
        kind: Kind,
        began: float,
        ended: float,
        number: int,
        peer: str,
        thread: int,
        marks: tuple[float, ...] = (),
        *,
        pass_id: int = 0,
    ) -> None:
        shift, events = self.shifts[worker], self.events[worker]
        times = began + shift, ended + shift
        events.append(Event(len(events), kind, *times, number, peer, "f", pass_id=pass_id, thread=thread, marks=marks))

    def view(self) -> GroupView:
        """Return what an observer sees whose clock shows the true time."""
        views = [
            worker_view(
                self.name(worker),
                worker,
                now=self.end + self.shifts[worker],
                events=tuple(self.events[worker]),
                made=tuple(self.made[worker]),
                served=tuple(self.served[worker]),
                next_event=len(self.events[worker]),
            )
            for worker in range(self.workers)
        ]
        offsets = {
            self.name(worker): self.random.uniform(-self.error, self.error) - self.shifts[worker]
            for worker in range(self.workers)
        }
        return GroupView(tuple(views), offsets=offsets, errors=dict.fromkeys(offsets, self.error), now=self.end)
