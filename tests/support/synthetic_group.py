"""A group that exists only as views: a trainer and stages of a pipeline, which train, or wait for each other.

Its state is a function of time, so a test chooses the moment that it looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from telegrad.observe.model import (
    ContextView,
    Edge,
    Event,
    EventPosition,
    GroupView,
    Kind,
    LiveCall,
    PassView,
    WorkerView,
)

STEP = 1.6
_UNUSED = ("float32[32, 10]",)  # the shape of an output without a gradient
"""Seconds of one training step: forward for the first half, then backward, then the optimizer."""
OFFSET = 1000.0
"""Each worker's clock is so many seconds behind that of the one before."""


class SyntheticGroup:
    """Workers "trainer", "stage0", "stage1", ... whose clocks differ."""

    def __init__(self, stages: int = 3, began: float = 100_000.0, stuck_since: float | None = None) -> None:
        self.names = ["trainer", *(f"stage{number}" for number in range(stages))]
        self.began, self.stuck_since = began, stuck_since
        self.steps_told = 0

    def view(self, now: float, since: Mapping[str, EventPosition] | None = None) -> GroupView:
        """Return the group as it is at `now`, on the observer's clock, with events from these numbers on."""
        offsets = {name: OFFSET * index for index, name in enumerate(self.names)}
        workers = tuple(self._worker(name, now, (since or {}).get(name, (0, 0))[1]) for name in self.names)
        return GroupView(workers, {}, offsets, dict.fromkeys(self.names, 2e-5), now)

    def _worker(self, name: str, now: float, since: int) -> WorkerView:
        index = self.names.index(name)
        busy = now if self.stuck_since is None else min(now, self.stuck_since)
        age = busy - self.began
        steps = int(age / STEP)
        events = [event for step in range(max(0, steps - 20), steps) for event in self._events(name, step)]
        numbered = [event for event in events if event.number >= since]
        wave = 1 + 0.5 * math.sin(now / 7 + index)
        local = OFFSET * index
        return WorkerView(
            name,
            index,
            0xA11CE000 + index,
            0,
            f"node{index // 2}",
            41_000 + index,
            (f"unix:/run/user/1000/telegrad/{name}.sock", f"tcp:10.0.0.{index + 1}:4{index}100"),
            now - local,
            1_790_000_000 + now,
            self.began - local,
            dict.fromkeys(self.names, "alive"),
            {
                other: "unix" if abs(self.names.index(other) - index) < 2 else "tcp+tls"
                for other in self.names
                if other != name
            },
            calls_made=int(age * 140 / (index + 1)),
            calls_served=int(age * 90 * (index > 0)),
            bytes_sent=int(age * 5e6 * (index + 1) + 4e6 * math.sin(now / 3 + index)),
            bytes_received=int(age * 6e6),
            memory=int((420 + 130 * index + 40 * wave) * 2**20),
            shared_memory=64 * 2**20,
            threads=14 + index,
            descriptors=38 + 2 * index,
            cpu_seconds=age * 0.55 + index + 0.8 * math.sin(now / 5 + index),
            passes_run=steps,
            passes_begun=0 if index else steps,
            optimizer_steps=steps,
            references_owned=4 * index,
            references_held=12 if index == 0 else 1,
            made=tuple(self._made(name, now)),
            served=tuple(self._served(name, now)),
            passes=tuple(self._passes(name, busy)),
            contexts=(self._context(name, steps, busy),),
            contexts_alive=1,
            events=tuple(numbered),
            next_event=steps * 100,
        )

    def _live(self, now: float) -> Iterator[tuple[str, str, LiveCall]]:
        """Yield calls that have not ended, each nested in the one before: caller, callee, and the caller's view."""
        busy = now if self.stuck_since is None else self.stuck_since
        phase = (busy - self.began) % STEP
        if self.stuck_since is None and phase > STEP / 2:
            return
        parent = None
        for index, (caller, callee) in enumerate(zip(self.names, self.names[1:], strict=False)):
            began = busy - phase + 0.05 * index
            if began > busy:
                return
            call = LiveCall(
                int((busy - self.began) / STEP) + 1,
                caller,
                callee,
                "pipeline.train:Stage.forward",
                began - OFFSET * index,
                None,
                parent,
                0,
                "sent",
                where=f"train.py:{40 + index}",
            )
            parent = (caller, call.id)
            yield caller, callee, call

    def _made(self, name: str, now: float) -> Iterator[LiveCall]:
        return (call for caller, _, call in self._live(now) if caller == name)

    def _served(self, name: str, now: float) -> Iterator[LiveCall]:
        for _, callee, call in self._live(now):
            if callee == name:
                yield LiveCall(
                    call.id,
                    call.caller,
                    callee,
                    call.function,
                    call.began - OFFSET + 0.001,
                    state="running",
                    where="stage.py:88",
                )

    def context(self, step: int) -> int:
        """Return the id of the context of a step."""
        return (0 << 48) + 0xC0FFEE0000 + step

    def _edges(self, step: int) -> list[Edge]:
        there = list(zip(self.names, self.names[1:], strict=False))
        pairs = [*there, *((callee, caller) for caller, callee in reversed(there))]
        counts: dict[str, int] = {}
        edges = []
        for source, target in pairs:
            counts[source] = counts.get(source, 0) + 1
            number = (self.names.index(source) << 48) + step * 100 + counts[source]
            edges.append(Edge(number, source, target, 1, ("float32[32, 512]",)))
        # A second output that nothing uses: no gradient comes back for it.
        edges.append(Edge((1 << 48) + step * 100 + 50, "stage0", "trainer", 1, _UNUSED))
        return edges

    def _context(self, name: str, step: int, now: float) -> ContextView:
        index, phase = self.names.index(name), (now - self.began) % STEP
        shown = self._edges(step)[: 1 + int(phase / (STEP / 2) * 8)]
        return ContextView(
            self.context(step),
            self.began + step * STEP - OFFSET * index,
            tuple(self.names),
            tuple(edge for edge in shown if edge.source == name),
            tuple(edge for edge in shown if edge.target == name),
        )

    def _passes(self, name: str, now: float) -> Iterator[PassView]:
        step, phase = divmod(now - self.began, STEP)
        if STEP / 2 <= phase < STEP * 0.9:
            began = self.began + step * STEP + STEP / 2 - OFFSET * self.names.index(name)
            yield PassView(int(step) + 1, self.context(int(step)), began, "trainer", ("stage0",), 1, 1, (), "runs")

    def _events(self, name: str, step: int) -> Iterator[Event]:
        """Yield what a worker tells of a step, on its clock."""
        index, context = self.names.index(name), self.context(step)
        start = self.began + step * STEP - OFFSET * index
        number = step * 100
        depth = len(self.names) - 1
        if index < depth:
            yield Event(
                number,
                Kind.CALL,
                start + 0.05 * index,
                start + 0.75 - 0.05 * index,
                step + 1,
                self.names[index + 1],
                "pipeline.train:Stage.forward",
                context,
                size=65536,
                received=65536,
            )
        if index > 0:
            yield Event(
                number + 1,
                Kind.SERVE,
                start + 0.05 * index - 0.03,
                start + 0.75 - 0.05 * index + 0.03,
                step + 1,
                self.names[index - 1],
                "pipeline.train:Stage.forward",
                context,
            )
        back, duration = start + STEP / 2, STEP * 0.4
        edges = [edge for edge in self._edges(step) if edge.shapes != _UNUSED][::-1]
        for place, edge in enumerate(edges):
            at = back + (place + 0.5) * duration / len(edges)
            if edge.target == name:
                yield Event(
                    number + 10 + place,
                    Kind.GRADIENT_SENT,
                    at,
                    at,
                    edge.message,
                    edge.source,
                    "",
                    context,
                    step + 1,
                    size=65536,
                )
            if edge.source == name:
                yield Event(
                    number + 10 + place,
                    Kind.GRADIENT_ARRIVED,
                    at + 0.02,
                    at + 0.02,
                    edge.message,
                    edge.target,
                    "",
                    context,
                    step + 1,
                )
                yield Event(
                    number + 30 + place,
                    Kind.ISLAND,
                    at + 0.02,
                    at + duration / len(edges) * 0.9,
                    0,
                    edge.target,
                    "gradient",
                    context,
                    step + 1,
                )
        yield Event(
            number + 60,
            Kind.PASS,
            back + 0.01 * index,
            back + duration,
            step + 1,
            "trainer",
            "backward",
            context,
            step + 1,
        )
        yield Event(number + 61, Kind.STEP, back + duration + 0.02, back + duration + 0.1, 0, "", "Adam")
