"""Paths to the inputs of a pass: one rule at a time, and on random graphs with any order of delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.protocol.test_backward import SEEDS, Graph, World, begun, graphs

from telegrad.protocol.backward import (
    ROOT,
    Acknowledge,
    BackwardPass,
    BeginPass,
    Entry,
    IdleReport,
    PassDone,
    PassEffect,
    ResumePass,
    StartIsland,
)
from telegrad.protocol.input_paths import InputPaths, Origin, Vertex

# One rule at a time


def make_paths(graph: dict[str, list[Vertex]], wanted: set[Vertex]) -> InputPaths:
    return InputPaths(lambda place: graph[place], wanted)  # type: ignore[index]  # only nodes are asked for


def test_only_nodes_that_lead_to_an_input_are_needed() -> None:
    paths = make_paths({"loss": ["y", "other"], "y": ["x"], "other": ["z"], "x": [], "z": []}, {"x"})
    assert paths.walk([("root", "loss")]) == ([], ["root"])
    assert paths.needed == {"loss", "y", "x"}


def test_the_walk_continues_behind_an_input() -> None:
    paths = make_paths({"loss": ["y"], "y": ["x"], "x": []}, {"x", "y"})
    paths.walk([("root", "loss")])
    assert paths.needed == {"loss", "y", "x"}


def test_received_tensors_are_asked_about_once_and_needed_if_their_sender_reports_a_path() -> None:
    paths = make_paths({"loss": [(7, 0), (7, 1)], "sent": [(7, 1)]}, set())
    asked, told = paths.walk([("root", "loss")])
    assert (sorted(asked), told) == ([(7, 0), (7, 1)], [])
    assert paths.walk([((8, 0), "sent")]) == ([], [])
    assert paths.mark_leading([(7, 1)]) in (["root", (8, 0)], [(8, 0), "root"])
    assert paths.mark_leading([(7, 1)]) == []
    assert (7, 0) not in paths.needed


def test_a_received_tensor_that_is_an_input_is_needed_even_if_nothing_behind_it_is() -> None:
    paths = make_paths({"loss": [(7, 0)]}, {(7, 0)})
    assert paths.walk([("root", "loss")]) == ([(7, 0)], ["root"])
    assert not paths.leading


def test_a_tensor_that_is_known_to_lead_to_an_input_is_reported_at_once() -> None:
    paths = make_paths({"sent": ["x"], "above": ["sent"], "x": []}, {"x"})
    assert paths.walk([((7, 0), "sent")]) == ([], [(7, 0)])
    assert paths.walk([((8, 0), "sent")]) == ([], [(8, 0)])
    assert paths.walk([((9, 0), "above")]) == ([], [(9, 0)])


def probing_first() -> BackwardPass[str]:
    state: BackwardPass[str] = BackwardPass(0)
    state.probe_first()
    return state


def test_the_pass_begins_when_the_search_is_over() -> None:
    state = probing_first()
    state.probe_sent()
    assert state.probe_walked() == []
    assert state.engaged
    assert state.probe_received("leads") == [Acknowledge("leads")]
    assert state.probe_acknowledged({1: IdleReport(1, False)}) == []
    assert state.probe_walked() == [BeginPass()]
    assert state.engaged  # so that a lost worker is noticed
    state.plan({0: {ROOT}})
    assert state.begin() == [StartIsland(0)]
    assert state.island_finished() == [PassDone()]
    assert not state.engaged


def test_after_the_search_an_island_that_is_partly_fed_needs_no_probe() -> None:
    state = probing_first()
    assert state.probe_walked() == [BeginPass()]
    state.plan({0: {ROOT, 10}})
    assert state.begin() == [ResumePass(())]
    assert state.replan({1: {ROOT, 10}}) == [StartIsland(1, (10,))]


def test_a_pass_does_not_begin_after_a_failure_in_the_search() -> None:
    state = probing_first()
    state.probe_sent()
    state.abort()
    assert state.probe_walked() == []
    assert state.probe_acknowledged({}) == []
    assert not state.engaged


def test_a_pass_without_inputs_does_not_search() -> None:
    state, effects = begun({0: {ROOT}})
    assert effects == [StartIsland(0)]
    assert state.engaged


# Together, on random graphs


class InputsWorld(World):
    """A pass that first searches for the paths to inputs of worker 0, and then runs only what is on them."""

    def __init__(self, graph: Graph, seed: int, inputs: frozenset[int]) -> None:
        super().__init__(graph, seed)
        self.whole = graph
        self.inputs = {
            number for number in inputs if number < len(graph.messages) and graph.messages[number].sender == 0
        }
        wanted = {Node(number) for number in self.inputs}
        self.paths = [InputPaths(self._below, () if worker else wanted) for worker in range(graph.workers)]
        self.needed: set[Entry] = set()
        self.begun = 0

    def expected(self) -> set[Entry]:
        """Return the needed entries, computed in one process."""
        leads = set(self.inputs)
        for number, message in enumerate(self.whole.messages):  # messages that it uses were sent before it
            if message.uses & leads:
                leads.add(number)
        return {entry for entry in self.whole.reached() if entry in leads}

    def _below(self, place: Vertex) -> list[Vertex]:
        assert isinstance(place, Node)
        return [(number, 0) for number in self.whole.at(place.entry).uses]

    def begin_here(self) -> None:
        self.passes[0].probe_first()
        self._later("probe", 0, partial(self._walk, 0, ROOT))

    def _carry_out(self, worker: int, effects: Iterable[PassEffect[int]]) -> None:
        there = list(effects)
        if BeginPass() in there:
            there.remove(BeginPass())
            assert worker == 0
            assert not self._under_way("probe"), "the search ended while it was in progress"
            self.begun += 1
            assert self.begun == 1
            self._later("flow", 0, self._begin)
        super()._carry_out(worker, there)

    def _begin(self) -> None:
        assert self.needed == self.expected()
        onward = [{number for number, _ in paths.leading} for paths in self.paths]  # type: ignore[misc]
        messages = tuple(
            replace(message, uses=message.uses & onward[message.sender]) for message in self.whole.messages
        )
        root = replace(self.whole.root, uses=self.whole.root.uses & onward[0])
        self.graph = replace(self.whole, messages=messages, root=root)
        self.live = {number for number in self.needed if isinstance(number, int)}
        self.arrived.add(ROOT)
        self._plan(0)
        self._carry_out(0, self.passes[0].begin())

    def _entries_of(self, worker: int) -> set[Entry]:
        return self.graph.entries_of(worker) & (self.needed | {ROOT})

    def _walk(self, worker: int, entry: Entry) -> None:
        origin: Origin = ROOT if entry == ROOT else (entry, 0)
        self._pass_on(worker, partial(self.paths[worker].walk, [(origin, Node(entry))]))

    def _lead(self, worker: int, number: int) -> None:
        self._pass_on(worker, lambda: ([], self.paths[worker].mark_leading([(number, 0)])))

    def _pass_on(self, worker: int, walk: Callable[[], tuple[list[tuple[int, int]], list[Origin]]]) -> None:
        if worker not in self.failed:
            asked, told = walk()
            for number, _ in asked:
                self.passes[worker].probe_sent()
                receiver = self.whole.messages[number].sender
                self._ask("probe", worker, receiver, partial(self._take_probe, receiver, number))
            for origin in told:
                if origin != ROOT:
                    number = origin[0]  # type: ignore[index]
                    assert number not in self.needed, "reported twice"
                    self.needed.add(number)
                    self.passes[worker].probe_sent()
                    receiver = self.whole.messages[number].receiver
                    self._ask("probe", worker, receiver, partial(self._take_leads, receiver, number))
        self._later("probe", worker, partial(self._walked, worker))

    def _take_leads(self, worker: int, number: int, ticket: int) -> None:
        self._carry_out(worker, self.passes[worker].probe_received(ticket))
        self._later("probe", worker, partial(self._lead, worker, number))


class Node:
    """The node that produced one entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.entry == self.entry

    def __hash__(self) -> int:
        return hash(self.entry)


INPUTS = st.frozensets(st.integers(0, 19), min_size=1, max_size=6)


@given(graphs(), SEEDS, INPUTS)
@settings(max_examples=150, deadline=None)
def test_exactly_the_paths_to_inputs_run_and_the_pass_ends_once(
    graph: Graph, seed: int, inputs: frozenset[int]
) -> None:
    world = InputsWorld(graph, seed, inputs)
    world.run()
    event(f"{world.resumes} resumes")
    assert (world.begun, world.done, world.probes) == (1, 1, 0)
    assert set(world.sent) == world.needed
    assert sorted(world.completed, key=str) == sorted({ROOT, *world.needed}, key=str)
    world.check_nobody_waits()


@given(graphs(), SEEDS, INPUTS)
@settings(max_examples=100, deadline=None)
def test_a_failed_pass_with_inputs_acknowledges_every_message(graph: Graph, seed: int, inputs: frozenset[int]) -> None:
    world = InputsWorld(graph, seed, inputs)
    world.run(world.fail_somewhere, world.send_late_message)
    event("done before" if world.done else "failed")
    assert world.done or 0 in world.failed
    world.check_nobody_waits()


@given(graphs(), SEEDS, INPUTS)
@settings(max_examples=100, deadline=None)
def test_a_pass_with_inputs_that_loses_a_worker_leaves_nobody_waiting(
    graph: Graph, seed: int, inputs: frozenset[int]
) -> None:
    world = InputsWorld(graph, seed, inputs)
    world.run(world.lose_somebody, world.send_late_message)
    event("done" if world.done else "failed")
    assert world.done or world.dead & {0} or 0 in world.failed
    world.check_nobody_waits()
