"""A worker that was killed takes its place again: with a launcher at once, otherwise with the votes of a quorum."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from telegrad.connection.joining import SERVICE, GroupEnded, parse_description
from telegrad.connection.questions import probe
from telegrad.errors import NotAMember, ProtocolError, WorkerLost
from telegrad.protocol.membership import MAX_STEP, State, Vote
from telegrad.testing.simulation import JOIN_TIMEOUT, Simulation
from telegrad.wire.handshake_messages import Description


def run(names: str, program: Callable[[Simulation], Any], seed: int = 1) -> Any:
    with Simulation(seed, list(names)) as sim:
        return sim.run(lambda: program(sim))


def call_all(sim: Simulation, names: Sequence[str]) -> None:
    for caller in names:
        for callee in names:
            assert sim[caller].call(callee, operator.add, (1, 2)) == 3


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_killed_worker_is_replaced_and_everybody_can_call_it(name: str, vouched: bool) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill(name)
        sim.restart(name, vouched=vouched)
        call_all(sim, "abc")
        for agent in sim.agents.values():
            member = agent.peers.members.find(name)
            assert member is not None
            assert (member.state, member.identity.generation) == (State.ALIVE, 1)

    run("abc", program)


def test_a_worker_is_replaced_any_number_of_times() -> None:
    def program(sim: Simulation) -> None:
        for round_ in range(5):
            for name in "abc":
                sim.kill(name)
                sim.restart(name, vouched=(round_ % 2 == 0))
                call_all(sim, "abc")

    run("abc", program)


def test_all_but_one_may_be_replaced_at_once_by_a_launcher() -> None:
    def program(sim: Simulation) -> None:
        for name in "abc":
            sim.kill(name)
        for name in "abc":
            sim.restart(name)
        call_all(sim, "abcd")

    run("abcd", program)


def test_a_newcomer_without_a_quorum_is_told_who_does_not_agree() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")
        sim.kill("c")
        began = sim.scheduler.now
        with pytest.raises(NotAMember, match=r"1 of 3 workers agree, and more than half.*worker 'c': it does not"):
            sim.restart("b", vouched=False)
        assert sim.scheduler.now - began < JOIN_TIMEOUT + 5

    run("abc", program)


def test_worker_0_may_admit_a_new_worker_1_but_not_the_other_way_round() -> None:
    def second(sim: Simulation) -> None:
        sim.kill("b")
        sim.restart("b", vouched=False)
        call_all(sim, "ab")

    def first(sim: Simulation) -> None:
        sim.kill("a")
        with pytest.raises(NotAMember, match=r"1 of 2 workers agree, .* lowest id\)\. A launcher"):
            sim.restart("a", vouched=False)

    run("ab", second)
    run("ab", first)


def test_a_worker_that_is_alive_is_not_replaced_by_votes(caplog: pytest.LogCaptureFixture) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        original = sim.agents["b"]
        listener = sim.network.listeners.pop("memory://b")
        agent = sim._make("b")
        sim.network.listeners["memory://b"] = listener
        members = [each.me for each in sim.agents.values()]
        with pytest.raises(NotAMember, match="worker 'a': another process is worker 'b', and it is alive"):
            agent.join(members, deadline=sim.scheduler.now + 10)
        agent.close()
        assert sim["a"].call("b", operator.add, (1, 2)) == 3
        assert original.peers.find("a").gone == ""

    with caplog.at_level(logging.WARNING, "telegrad"):
        run("abc", program)
    assert "worker 'b' waits to take its place in the group: 0 of 3 workers agree" in caplog.text


def test_a_worker_that_was_replaced_learns_it() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        for other in "ac":
            sim.network.part("b", other)
        old = sim.agents.pop("b")
        sim.network.listeners.pop("memory://b")
        sim.network.heal()
        sim.restart("b")
        assert sim["a"].call("b", operator.add, (1, 2)) == 3
        with pytest.raises(WorkerLost, match="was replaced by a later one"):
            old.call("a", operator.add, (1, 2))
        old.close()

    run("abc", program)


def test_the_time_of_a_vote_does_not_depend_on_when_the_machine_of_the_voter_started() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        sim.kill("b")
        ahead = sim["a"].runtime.now() + 1e6  # as if the machine of a was up for eleven days longer
        sim["a"].peers.members.merge_votes([("b", Vote(1, 77, ahead - 5))])
        sim["a"].runtime.now, now = (lambda: ahead), sim["a"].runtime.now  # type: ignore[method-assign]
        try:
            description = sim["a"].joining.describe()
        finally:
            sim["a"].runtime.now = now  # type: ignore[method-assign]
        sim["d"].joining._take(sim["a"].me, parse_description(description), {})
        vote = sim["d"].peers.members.votes()["b"]
        assert (vote.generation, vote.incarnation) == (1, 77)
        assert vote.at == pytest.approx(sim.scheduler.now - 5)

    run("abcd", program)


def say(text: str) -> Callable[[], Any]:
    """Return a service that answers newcomers with something of its own."""

    def describe() -> Any:
        if text == "error":
            raise KeyError("of a member")
        return text

    return describe


@pytest.mark.parametrize("answer", ["error", "garbage"])
def test_a_member_that_describes_the_group_wrongly_keeps_no_newcomer_out(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim["a"].register(SERVICE[1:], say(answer))
        sim.kill("b")
        sim.restart("b")
        call_all(sim, "abc")

    with caplog.at_level(logging.WARNING, "telegrad"):
        run("abc", program)
    assert "worker 'b' joins the group without knowing what worker 'a' knows of it" in caplog.text


def test_a_member_that_never_answers_keeps_no_newcomer_out_for_longer_than_its_timeout() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        never = sim["a"].runtime.event()
        sim["a"].register(SERVICE[1:], lambda: sim["a"].executor.wait(never, None))
        sim.kill("b")
        began = sim.scheduler.now
        sim.restart("b")
        assert JOIN_TIMEOUT <= sim.scheduler.now - began < JOIN_TIMEOUT + 5
        assert sim["c"].call("b", operator.add, (1, 2)) == 3
        never.set()

    run("abc", program)


@pytest.mark.parametrize("claimed", [2**64 - 1, 2**63 - 1, 2**40])
def test_one_member_that_lies_about_generations_does_not_use_them_up(claimed: int) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        sim.kill("b")
        sim["d"].peers.known_generation = lambda hello: claimed  # type: ignore[method-assign]
        sim.restart("b", vouched=False)
        member = sim["a"].peers.members.find("b")
        assert member is not None
        assert member.identity.generation == 1

    run("abcd", program)


def test_a_newcomer_exceeds_a_generation_that_only_one_member_knows() -> None:
    """A launcher's replacement reached d alone, and died. Those that vote for the next one have not heard of it."""

    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        before = sim["b"].me
        sim.kill("b")
        d = sim["d"].peers
        d.learn(msgspec.structs.replace(before, generation=7, incarnation=before.incarnation + 1))
        unknown = d.find("b")
        d.lost_workers.peer_lost(unknown, "it was killed")
        sim.restart("b", vouched=False)
        call_all(sim, "abcd")
        assert sim["b"].me.generation == 8

    run("abcd", program)


def test_a_member_that_always_knows_a_later_generation_keeps_nobody_out() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        sim.kill("b")
        sim["d"].peers.known_generation = lambda hello: hello.generation + 1  # type: ignore[method-assign]
        sim.restart("b", vouched=False)
        for name in "acd":
            assert sim[name].call("b", operator.add, (1, 2)) == 3

    run("abcd", program)


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (None, "Expected `array`"),
        ([[], [["b", "1", 2, 0.0]]], "Expected `int`, got `str`"),
        ([[], [["b", 2**64 - 1, 2, 0.0]]], "invalid generation"),
        ([[[{"name": "b", "id": 1, "incarnation": 5, "addresses": ["x"]}, 0]], []], "invalid address 'x'"),
        ([[[{"name": "b b", "id": 1, "incarnation": 5, "addresses": []}, 0]], []], "invalid worker name"),
        ([[[{"name": "b", "id": -1, "incarnation": 5, "addresses": []}, 1]], []], "invalid worker id"),
        ([[[{"name": "b", "id": 1, "incarnation": 5, "addresses": []}, 3]], []], "Invalid enum value 3"),
    ],
)
def test_an_invalid_description_of_the_group_is_refused(description: Any, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        parse_description(description)


def test_a_worker_can_be_probed() -> None:
    def program(sim: Simulation) -> list[str]:
        me, target = sim["a"], sim["b"].me
        said = [probe(me.peers, me.me, target, sim.scheduler.now + 1)]
        sim["b"].local.departing = True
        said.append(probe(me.peers, me.me, target, sim.scheduler.now + 1))
        sim.kill("b")
        said.append(probe(me.peers, me.me, target, sim.scheduler.now + 1))
        return said

    assert run("ab", program) == ["alive", "leaving", "gone"]


def test_workers_join_an_open_group_through_any_member() -> None:
    def program(sim: Simulation) -> None:
        agents = {}
        for number, name in enumerate("xyz"):
            sim._names.append(name)
            agents[name] = sim._make(name)
            if number == 0:
                agents[name].start([agents[name].me], is_open=True)
            else:
                agents[name].join([agents["x"].me], deadline=sim.scheduler.now + 10, is_open=True)
        for caller in agents.values():
            for callee in agents:
                assert caller.call(callee, operator.add, (1, 2)) == 3
        for agent in agents.values():
            agent.close()

    run("a", program)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_processes_that_want_one_place_one_gets_it(seed: int) -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")
        sim.network.dead.discard("memory://b")
        members = list(sim._records.values())
        ended: list[str] = []
        contenders = []
        for number in range(2):
            agent = sim._make("b")
            sim.network.listeners.pop("memory://b")  # each has its own address; nobody calls them here
            contenders.append(agent)

            def join(agent: Any = agent) -> None:
                try:
                    agent.join(members, deadline=sim.scheduler.now + 8)
                    ended.append("in")
                except NotAMember:
                    ended.append("out")

            sim.scheduler.start("b", f"contender {number}", join)
        sim.sleep(40)
        assert sorted(ended) == ["in", "out"]
        for agent in contenders:
            agent.close()

    run("abc", program, seed)


def test_a_newcomer_asks_a_member_that_was_replaced_while_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Without the vote of the new b, d has two votes of four."""

    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        for name in "bcd":
            sim.kill(name)
        began = sim.scheduler.now
        joined = []
        sim.scheduler.start("launcher", "d", lambda: joined.append(sim.restart("d", vouched=False)))
        sim.sleep(5)
        assert joined == []
        sim.restart("b")
        sim.restart("c")
        sim.sleep(10)
        assert len(joined) == 1, sim.scheduler.now - began
        call_all(sim, "abcd")

    run("abcd", program)


def test_a_member_that_invents_a_replacement_keeps_nobody_out() -> None:
    """While d waits for the vote of c, a tells it of a b with a generation that cannot be."""

    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        record, peers = sim["b"].me, sim["a"].peers
        invented = msgspec.structs.replace(record, incarnation=9, generation=MAX_STEP + 1)
        lies, describe = [], peers.describe

        def lie(member: int) -> Description:
            if member != record.id:
                return describe(member)
            lies.append(member)
            return Description(msgspec.msgpack.encode(invented), State.ALIVE, False, b"")

        vars(peers)["describe"] = lie
        for name in "bd":
            sim.kill(name)
        sim.network.part("c", "d")
        joined = []
        sim.scheduler.start("launcher", "d", lambda: joined.append(sim.restart("d", vouched=False)))
        sim.sleep(10)
        assert joined == []
        sim.network.heal()
        sim.sleep(30)
        assert lies
        assert joined[0].peers.find("b").record == record

    run("abcd", program)


def test_members_without_a_session_notice_that_a_worker_is_cut_off() -> None:
    """Only a has called b. The others have to find out for themselves before they vote."""

    def program(sim: Simulation) -> None:
        sim["a"].call("b", operator.add, (1, 2))
        for other in "acde":
            sim.network.part("b", other)
        joined = []
        sim.scheduler.start("launcher", "b", lambda: joined.append(sim.restart("b", vouched=False, place="b2")))
        sim.sleep(55)
        assert len(joined) == 1
        joined[0].close()

    run("abcde", program)


def test_the_age_of_votes_is_told_and_not_their_time() -> None:
    """The clock of b is far ahead of that of c, to which it tells its votes."""

    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        b, c = sim["b"], sim["c"]
        b.peers.members.merge_votes([("a", Vote(1, 77, b.runtime.now() - 3.0))])
        told = parse_description(b.joining.describe())
        sim.sleep(2)
        c.joining._take(b.me, told, {})
        told = c.peers.members.votes()["a"]
        assert (told.generation, told.incarnation) == (1, 77)
        assert c.runtime.now() - told.at == pytest.approx(3.0)

    run("abc", program)


def test_a_newcomer_does_not_vote_before_it_has_heard_of_the_votes_of_others() -> None:
    may_vote: list[bool] = []

    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")

        def watch(agent: Any) -> None:
            introduce = agent.joining.introduce

            def watched(deadline: float) -> None:
                may_vote.append(agent.peers.members.may_vote)
                introduce(deadline)
                may_vote.append(agent.peers.members.may_vote)

            agent.joining.introduce = watched

        sim.restart("b", prepare=watch)

    run("abc", program)
    assert may_vote == [False, True]


def test_two_workers_that_join_an_open_group_at_once_know_the_same_generations() -> None:
    """y returns, and needs votes. z has found it in the store before it had its generation."""

    def program(sim: Simulation) -> None:
        sim._names += ["y", "z"]
        a = sim.agents["a"]
        a.peers.set_group([a.me], is_open=True)
        first = sim._make("y")
        first.join([a.me], deadline=sim.scheduler.now + 10, is_open=True)
        first.close()
        sim.sleep(1)
        sim.network.dead.discard("memory://y")
        y, z = sim._make("y"), sim._make("z")
        before = y.me
        get_votes = y.joining.get_votes

        def get_votes_late(*args: Any) -> Any:
            result = get_votes(*args)
            z.join([a.me, before], deadline=sim.scheduler.now + 10, is_open=True)
            return result

        y.joining.get_votes = get_votes_late  # type: ignore[method-assign]
        y.join([a.me, first.me], deadline=sim.scheduler.now + 10, is_open=True)
        assert y.me.generation == 1
        views = {tuple((peer.record.name, peer.record.generation) for peer in each.peers.all()) for each in (a, y, z)}
        assert views == {(("a", 0), ("y", 1), ("z", 0))}
        assert {member.identity.name for member in y.peers.members.all()} == {"a", "y", "z"}
        for agent in (y, z):
            agent.close()

    run("a", program)


def test_a_newcomer_learns_who_has_left_and_does_not_wait_for_it() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim["c"].shutdown()
        began = sim.scheduler.now
        d = sim.join("d")  # which hears of c from the others only
        assert sim.scheduler.now - began < 0.5
        member = d.peers.members.find("c")
        assert member is not None
        assert member.state is State.LEFT

    with Simulation(1, list("abc"), is_open=True) as sim:
        sim.run(lambda: program(sim))


def test_a_newcomer_does_not_wait_long_for_a_member_that_all_others_have_lost() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abcd")
        for name in "acd":
            sim.network.part("b", name)
        sim.sleep(70)
        assert sim["a"].peers.find("b").gone
        sim.network.parted.add(("memory://d", "memory://b"))
        sim.kill("d")
        began = sim.scheduler.now
        d = sim.restart("d")
        assert sim.scheduler.now - began < 8
        assert d.peers.find("b").gone == "it does not answer, and the members that do have lost it"

    run("abcd", program)


def test_a_worker_that_heard_of_no_quorum_votes_when_it_has_heard_of_one() -> None:
    """While c joins, b and e do not tell it anything. Later, without its vote, e has two of five."""

    def program(sim: Simulation) -> None:
        call_all(sim, "abcde")
        sim.kill("c")
        for name in "be":
            sim[name].register(SERVICE[1:], lambda: None)
        c = sim.restart("c")
        assert not c.peers.members.may_vote
        for name in "be":
            sim[name].register(SERVICE[1:], sim[name].joining.describe)
        sim.kill("d")
        sim.kill("e")
        sim.restart("e", vouched=False)
        assert c.peers.members.may_vote

    run("abcde", program)


def test_a_newcomer_gives_up_a_group_that_all_have_left() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abc")
        sim.kill("b")
        sim["c"].peers.members.set_voting(False)
        sim["a"].peers.members.set_voting(False)
        failed: list[str] = []

        def join() -> None:
            with pytest.raises(GroupEnded, match="all 2 other members have left it or died") as caught:
                sim.restart("b", vouched=False)
            failed.append(str(caught.value))

        sim["a"].peers.on_abstention = sim["c"].peers.on_abstention = lambda: None
        sim.scheduler.start("launcher", "b", join)
        sim.sleep(5)
        assert not failed
        sim.agents.pop("a").close()
        sim.kill("c")
        sim.sleep(10)
        assert failed

    run("abc", program)


def test_all_but_one_may_leave_an_open_group_and_return_at_once() -> None:
    def program(sim: Simulation) -> None:
        call_all(sim, "abcdef")
        for name in "bcdef":
            sim[name].shutdown()
        threads = [
            sim.scheduler.start("launcher", name, lambda name=name: sim.restart(name, vouched=False))
            for name in "bcdef"
        ]
        for thread in threads:
            thread.join(None)
        call_all(sim, "abcdef")
        assert [one.identity.generation for one in sim["a"].peers.members.all()] == [0, 1, 1, 1, 1, 1]

    with Simulation(1, list("abcdef"), is_open=True) as sim:
        sim.run(lambda: program(sim))
