"""The short ways of a pass do what the general ways do: the same effects, gradients, messages and events.

The general ways are written here once more, step by step, and both are run on the same random graphs and programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from tests.protocol.test_backward import SEEDS, Graph, World, graphs

from telegrad.backward import pass_run
from telegrad.backward.island_engine import IslandEngine
from telegrad.events import EventRing
from telegrad.protocol.backward import ROOT, BackwardPass, Entry, IdleReport, PassEffect
from telegrad.protocol.termination import Termination
from telegrad.testing.programs import chosen
from telegrad.testing.soak import run_seed
from telegrad.wire import tensor_encode

Effects = list[PassEffect[Any]]
THREAD = 13
"""The place of the thread in an event, which differs from run to run."""


class LongTermination(Termination[Any]):
    """Decides each time whether rule 1 applies."""

    def acknowledged(self, sender: Any = None, count: int = 0) -> list[Any]:
        if count and self._received.get(sender, 0) < count:
            self._held.append((sender, count))
            return []
        self.unacknowledged -= 1
        return self.settle()


class LongWay(BackwardPass[Any]):
    """Takes every step, whatever the state is."""

    flow: Termination[Any] = msgspec.field(default_factory=LongTermination)

    def begin(self) -> Effects:
        self._probing_first = False
        self.flow.start()
        effects = self._arrive(ROOT)
        return effects + self._settled(self.flow.idle())

    def _arrive(self, entry: Entry) -> Effects:
        number = self.island_of.get(entry)
        if number is None:
            return []
        island = self._islands[number]
        if not island.arrived and not island.started:
            self._partly_fed += 1
        island.arrived.add(entry)
        return self._start(number)

    def acknowledged(self, reports: Mapping[int, IdleReport], sender: int | None = None, count: int = 0) -> Effects:
        self._merge(reports)
        return self._settled(self.flow.acknowledged(sender, count))

    def island_finished(self) -> Effects:
        return self._settled(self.flow.idle())


class Traced(World):
    """Notes all effects."""

    def __init__(self, graph: Graph, seed: int, rules: type[BackwardPass[Any]]) -> None:
        super().__init__(graph, seed)
        self.passes = [rules(worker) for worker in range(graph.workers)]
        self.seen: list[tuple[int, Effects]] = []

    def _carry_out(self, worker: int, effects: Iterable[PassEffect[int]]) -> None:
        self.seen.append((worker, list(effects)))
        super()._carry_out(worker, self.seen[-1][1])


@pytest.mark.parametrize("disturbances", [(), ("send_late_message", "send_late_probe"), ("fail_somewhere",)])
@given(graphs(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_short_ways_of_the_rules_have_the_effects_of_the_long_ones(
    disturbances: tuple[str, ...], graph: Graph, seed: int
) -> None:
    short, long = (Traced(graph, seed, rules) for rules in (BackwardPass, LongWay))
    for world in (short, long):
        world.run(*[getattr(world, name) for name in disturbances])
    assert short.seen == long.seen
    assert [state.reports() for state in short.passes] == [state.reports() for state in long.passes]


def run(seeds: range, patch: pytest.MonkeyPatch) -> tuple[list[str], list[list[Any]]]:
    """Run random programs, each compared with one process. Returns their outcomes and the events of all workers."""
    rings: list[EventRing] = []
    make = EventRing.__init__

    def make_and_note(self: EventRing, *args: int) -> None:
        make(self, *args)
        rings.append(self)

    with patch.context() as noting:
        noting.setattr(EventRing, "__init__", make_and_note)
        outcomes = [run_seed(seed, chosen(None)) for seed in seeds]
    return outcomes, [[(*event[:THREAD], *event[THREAD + 1 :]) for event in ring.since(0)[0]] for ring in rings]


@pytest.mark.parametrize("block", range(2))
def test_programs_have_the_same_gradients_messages_and_events_both_ways(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(700 + 12 * block, 712 + 12 * block)
    short = run(seeds, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(pass_run, "BackwardPass", LongWay)
        patch.setattr(IslandEngine, "_entered", lambda *_: None)
        patch.setattr(IslandEngine, "accumulate_directly", _never)
        patch.setattr(tensor_encode, "_describe_plain", lambda *_: False)
        long = run(seeds, monkeypatch)
    assert short[0] == long[0]
    assert any(short[1])
    for mine, others in zip(short[1], long[1], strict=True):
        assert list(map(partial(_without, "leaves only"), mine)) == list(map(partial(_without, "leaves only"), others))


def _never(*_: Any) -> bool:
    return False


def _without(what: str, event: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an event without this text about how an island was run."""
    return tuple("" if part == what else part for part in event)
