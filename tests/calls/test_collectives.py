"""Collectives: every member contributes a value and gets those of all."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from telegrad.agent.agent import Agent
from telegrad.agent.shutdown import RRefMessageCounts
from telegrad.calls.collectives import _Collective
from telegrad.errors import TelegradError, UnknownWorker
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation


def test_the_root_gets_its_reply_last_because_it_may_leave_then() -> None:
    with local_group(["a", "b", "c"]) as agents:
        collectives = agents["a"].collectives
        replies: list[str] = []
        for name in ("a", "c", "b"):  # the root itself arrives first
            respond = partial(lambda name, values, error: replies.append(name), name)
            collectives.arrive(respond, "user/1/a,b,c", ("a", "b", "c"), name, None, None)
        assert replies == ["c", "b", "a"]


def test_a_worker_takes_part_only_in_collectives_of_which_it_is_a_member() -> None:
    with local_group(["a", "b", "c"]) as agents:
        with pytest.raises(ValueError, match="worker 'a' is not among"):
            agents["a"].gather(1, ["b", "c"])
        with pytest.raises(UnknownWorker, match="'d'"):
            agents["a"].gather(1, ["a", "d"])


MEMBERS = ("a", "b", "c", "d")


class Asked:
    """A member that asks a root for rounds of a shutdown, and keeps the answers."""

    def __init__(self, root: Agent) -> None:
        self.root = root
        self.answers: list[tuple[str, int, list[str]]] = []

    def ask(self, name: str, number: int) -> None:
        key = f"shutdown/{number}/{','.join(MEMBERS)}"

        def respond(values: object, error: Exception | None) -> None:
            assert isinstance(values, dict)
            assert error is None
            self.answers.append((name, number, sorted(values)))

        self.root.collectives.arrive(respond, key, MEMBERS, name, None, None)


def test_a_new_root_does_not_wait_for_a_round_that_some_members_have_completed() -> None:
    with local_group(MEMBERS) as agents:
        asked = Asked(agents["b"])
        asked.ask("b", 3)
        asked.ask("c", 3)
        assert asked.answers == [], "they wait for a and d"
        asked.ask("d", 4)
        assert sorted(asked.answers) == [("b", 3, []), ("c", 3, [])], "d has the result of round 3, so it is over"
        asked.answers.clear()
        asked.ask("a", 3)
        assert asked.answers == [("a", 3, [])]
        asked.answers.clear()
        for name in ("a", "b", "c"):
            asked.ask(name, 4)
        assert sorted(asked.answers) == [(name, 4, list(MEMBERS)) for name in MEMBERS]


def test_a_root_that_is_closing_answers_nobody() -> None:
    with local_group(MEMBERS) as agents:
        asked = Asked(agents["a"])
        for name in MEMBERS[1:]:
            asked.ask(name, 1)
        agents["a"].close()
        assert asked.answers == []


@pytest.mark.parametrize("answered", [(), ("b",), ("c",), ("d",), ("b", "c"), ("c", "d"), ("b", "d")])
@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_ends_if_its_root_leaves_after_answering_some_members(seed: int, answered: tuple[str, ...]) -> None:
    with Simulation(seed=seed, workers=MEMBERS) as sim:
        ended: list[str] = []

        def shut_down(name: str) -> None:
            sim[name].shutdown()
            ended.append(name)

        def program() -> None:
            root = sim["a"].collectives
            answer = root._answer

            def answer_some(collective: _Collective, error: Exception | None) -> None:
                collective.answers = {name: collective.answers[name] for name in answered}
                answer(collective, error)
                sim.spawn("a", sim["a"].close)

            root._answer = answer_some  # type: ignore[method-assign]  # the answers to the others get lost
            threads = [sim.spawn(name, partial(shut_down, name)) for name in MEMBERS[1:]]
            threads.append(sim.spawn("a", partial(take_part, sim["a"])))
            for thread in threads:
                assert thread.join(600.0), f"{thread.node} still waits"

        sim.run(program)
        assert sorted(ended) == ["b", "c", "d"]


def take_part(agent: Agent) -> None:
    """Take part in the first round of a shutdown, from which this worker will get no answer."""
    with contextlib.suppress(TelegradError):
        agent.collectives.gather((0, False, 0, RRefMessageCounts(False, {}, {})), timeout=None, topic="shutdown")
