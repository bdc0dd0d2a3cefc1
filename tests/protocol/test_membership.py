"""A name has one incarnation per generation: whoever votes, is cut off, dies or is replaced meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.protocol.membership import (
    HOLD,
    MAX_STEP,
    Admission,
    Identity,
    Member,
    Membership,
    NotAdmitted,
    State,
    Vote,
)

NAMES = "abcdefg"


def identity(name: str, incarnation: int = 0, generation: int = 0) -> Identity:
    return Identity(name, NAMES.index(name), incarnation, generation)


def group(size: int, me: str = "a", **options: bool) -> Membership:
    membership = Membership(identity(me), 0.0, **options)
    for name in NAMES[:size]:
        membership.add(identity(name), 0.0)
    return membership


def lose(membership: Membership, name: str, now: float = 1.0) -> None:
    member = membership.find(name)
    assert member is not None
    assert membership.gone(name, member.identity.incarnation, State.LOST, now)


# -- who is there -------------------------------------------------------------------------------------------------


def test_a_generation_that_a_worker_gets_after_it_is_known_is_that_of_the_same_worker() -> None:
    membership = group(3)
    assert not membership.add(identity("b", generation=1), 1.0)
    assert membership.admit(identity("c", generation=2), 1.0) is Admission.KNOWN
    found = [(member.identity.generation, member.state, member.since) for member in membership.members()]
    assert found == [(0, State.ALIVE, 0.0), (1, State.ALIVE, 0.0), (2, State.ALIVE, 0.0)]


def test_members_are_listed_by_id_with_their_state() -> None:
    membership = group(3)
    lose(membership, "c", 2.5)
    assert [(member.identity.name, member.state, member.since) for member in membership.members()] == [
        ("a", State.ALIVE, 0.0),
        ("b", State.ALIVE, 0.0),
        ("c", State.LOST, 2.5),
    ]


def test_a_worker_is_gone_once_and_only_as_the_incarnation_that_is_known() -> None:
    membership = group(2)
    assert not membership.gone("c", 0, State.LOST, 1.0)
    assert not membership.gone("b", 7, State.LOST, 1.0)
    assert membership.gone("b", 0, State.LEFT, 1.0)
    assert not membership.gone("b", 0, State.LOST, 2.0)


def test_what_another_member_says_counts_if_its_generation_is_later() -> None:
    membership = group(2)
    assert not membership.add(identity("b", 5), 1.0)
    assert membership.add(identity("b", 5, 1), 1.0)
    member = membership.find("b")
    assert member is not None
    assert member.identity == identity("b", 5, 1)


def test_what_another_member_says_is_about_names_and_ids_that_the_group_can_have() -> None:
    closed, open_group = group(3), group(3, is_open=True)
    stranger = Identity("d", 3, 0, 0)
    assert closed.learn(stranger, 1.0) is Admission.KNOWN
    assert open_group.learn(stranger, 1.0) is Admission.JOINED
    for membership in (closed, open_group):
        assert membership.learn(Identity("e", 1, 0, 0), 1.0) is Admission.KNOWN, "the id belongs to another"
        of_another_id = identity("b", 5, 1)._replace(id=7)
        assert membership.learn(of_another_id, 1.0) is Admission.KNOWN, "the worker has another id"
        assert membership.learn(identity("b", 5, 1), 1.0) is Admission.DISPLACES
        lose(membership, "b")
        assert membership.learn(identity("b", 5, 1), 1.0) is Admission.REPLACES


def test_nobody_can_use_up_the_generations_of_a_name() -> None:
    membership = group(3)
    far = identity("b", 7, MAX_STEP + 1)
    assert membership.learn(far, 1.0) is Admission.KNOWN
    with pytest.raises(NotAdmitted, match="generation 4294967297 of worker 'b' is far ahead of the last one"):
        membership.admit(far, 1.0)
    with pytest.raises(NotAdmitted, match="far ahead"):
        membership.admit(identity("b", 0, MAX_STEP + 1), 1.0)  # the incarnation that is known
    with pytest.raises(NotAdmitted, match="worker 'a' is this worker"):
        membership.admit(identity("a", 0, 1), 1.0)
    assert [member.identity.generation for member in membership.members()] == [0, 0, 0]
    lose(membership, "b")
    assert "far ahead" in membership.vote(far, 1.0)
    membership.merge([("b", Vote(2**60, 9, 1.0)), ("nobody", Vote(1, 9, 1.0))])
    assert membership.votes() == {}
    assert membership.known_generation(identity("b", 8)) == 0
    open_group = group(3, is_open=True)
    assert open_group.learn(Identity("g", 9, 7, MAX_STEP + 1), 1.0) is Admission.KNOWN
    with pytest.raises(NotAdmitted, match="is not its first one"):
        open_group.admit(Identity("g", 9, 7, MAX_STEP + 1), 1.0)
    assert membership.vote(identity("b", 8, MAX_STEP), 1.0) == ""


# -- who may connect ----------------------------------------------------------------------------------------------


def test_a_later_generation_replaces_an_earlier_one() -> None:
    membership = group(2)
    assert membership.admit(identity("b"), 1.0) is Admission.KNOWN
    assert membership.admit(identity("b", 5, 3), 1.0) is Admission.DISPLACES
    assert membership.find("b") == Member(identity("b"), State.ALIVE, 0.0), "it is declared lost first"
    lose(membership, "b")
    assert membership.admit(identity("b", 5, 3), 1.0) is Admission.REPLACES
    assert membership.admit(identity("b", 5, 3), 1.0) is Admission.KNOWN
    with pytest.raises(NotAdmitted, match="was replaced by a later one: restart it"):
        membership.admit(identity("b"), 2.0)
    with pytest.raises(NotAdmitted, match="another process is worker 'b' of this group"):
        membership.admit(identity("b", 6, 3), 2.0)


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (Identity("x", 9, 0, 0), "there is no worker 'x' with id 9"),
        (Identity("b", 0, 0, 0), "there is no worker 'b' with id 0"),
        (Identity("a", 0, 5, 1), "worker 'a' is this worker"),
    ],
)
def test_others_are_not_admitted(who: Identity, reason: str) -> None:
    with pytest.raises(NotAdmitted, match=reason) as caught:
        group(2).admit(who, 1.0)
    assert caught.value.code == "name"


def test_anybody_with_a_new_name_and_id_joins_an_open_group() -> None:
    membership = group(2, is_open=True)
    assert membership.vote(identity("c"), 1.0) == ""
    assert membership.admit(identity("c"), 1.0) is Admission.JOINED
    assert membership.admit(identity("c"), 1.0) is Admission.KNOWN
    with pytest.raises(NotAdmitted, match="there is no worker 'd' with id 2"):
        membership.admit(Identity("d", 2, 0, 0), 1.0)


def test_a_worker_returns_to_an_open_group_that_it_has_left() -> None:
    membership = group(2, is_open=True)
    with pytest.raises(NotAdmitted, match="another process is worker 'b'"):
        membership.admit(identity("b", 5), 1.0)
    membership.gone("b", 0, State.LEFT, 2.0)
    assert membership.admit(identity("b", 5), 3.0) is Admission.REPLACES
    with pytest.raises(NotAdmitted, match="another process is worker 'b'"):
        membership.admit(identity("b", 6), 4.0)


# -- votes --------------------------------------------------------------------------------------------------------


def test_a_lost_worker_may_be_replaced_by_the_first_who_asks() -> None:
    membership = group(3)
    lose(membership, "b")
    assert membership.vote(identity("b", 5, 1), 2.0) == ""
    assert membership.vote(identity("b", 5, 1), 3.0) == ""
    assert membership.vote(identity("b", 6, 1), 3.0) == "it has voted for another process in generation 1"
    assert "it has just voted for another process" in membership.vote(identity("b", 6, 2), 3.0)
    assert membership.known_generation(identity("b", 6)) == 1
    assert membership.known_generation(identity("b", 5)) == 0
    assert membership.vote(identity("b", 6, 2), 3.0 + HOLD) == ""
    assert membership.vote(identity("b", 5, 1), 4.0 + HOLD) == "it has voted for another process in generation 2"


def test_a_replacement_that_is_lost_at_once_is_replaced_at_once() -> None:
    membership = group(3)
    lose(membership, "b")
    assert membership.vote(identity("b", 5, 1), 2.0) == ""
    assert membership.admit(identity("b", 5, 1), 2.1) is Admission.REPLACES
    lose(membership, "b", 2.2)
    assert membership.vote(identity("b", 6, 2), 2.3) == ""


def test_there_is_no_vote_for_what_is_not_lost_or_not_there() -> None:
    membership = group(2)
    assert membership.vote(identity("b", 5, 1), 1.0) == "another process is worker 'b', and it is alive"
    assert membership.vote(identity("b"), 1.0) == ""
    assert membership.vote(identity("c"), 1.0) == "there is no worker 'c' in this group"
    assert membership.vote(Identity("b", 6, 5, 1), 1.0) == "worker 'b' has id 1, not 6"
    lose(membership, "b")
    assert membership.vote(identity("b", 5, 0), 1.0) == "generation 0 of worker 'b' is over"
    assert membership.known_generation(identity("c")) == -1


def test_a_replacement_votes_when_it_knows_the_votes_of_a_quorum() -> None:
    voter, newcomer = group(3), group(3, "c")
    lose(voter, "b")
    lose(newcomer, "b")
    assert voter.vote(identity("b", 5, 1), 1.0) == ""
    newcomer.merge(voter.votes().items())
    newcomer.merge(voter.votes().items())
    assert newcomer.vote(identity("b", 6, 1), 1.0) == "it has voted for another process in generation 1"


@pytest.mark.parametrize(
    ("size", "newcomer", "voters", "suffices"),
    [
        (2, "b", "a", True),
        (2, "a", "b", False),
        (3, "b", "ac", True),
        (3, "b", "a", False),
        (4, "d", "ab", True),
        (4, "d", "bc", False),
        (4, "a", "bcd", True),
        (4, "a", "bc", False),
        (5, "e", "abc", True),
        (5, "e", "abe", False),
        (5, "e", "abx", False),
    ],
)
def test_a_quorum_is_more_than_half_or_half_with_the_lowest_id(
    size: int, newcomer: str, voters: str, suffices: bool
) -> None:
    assert group(size).is_quorum(newcomer, voters) is suffices


def test_a_worker_that_has_left_does_not_count_unless_it_returns() -> None:
    membership = group(3)
    membership.gone("c", 0, State.LEFT, 1.0)
    assert membership.is_quorum("b", "a")
    assert not membership.is_quorum("c", "a")


@given(st.integers(2, 7), st.data())
def test_two_quorums_have_a_voter_in_common(size: int, data: st.DataObject) -> None:
    names = NAMES[:size]
    membership = group(size)
    newcomers = [data.draw(st.sampled_from(names)) for _ in range(2)]
    quorums = [set(data.draw(st.lists(st.sampled_from(names), unique=True))) - {newcomer} for newcomer in newcomers]
    if all(membership.is_quorum(newcomer, quorum) for newcomer, quorum in zip(newcomers, quorums, strict=True)):
        assert quorums[0] & quorums[1]


@settings(max_examples=300)
@given(st.integers(2, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_no_generation_of_a_name_has_two_incarnations(size: int, steps: list[tuple[int, int, int]]) -> None:
    """Candidates ask any members in any order; members die and are replaced by those with a quorum."""
    names = NAMES[:size]
    members = {name: group(size, name) for name in names}
    incarnations = itertools.count(1)
    candidates: dict[int, tuple[Identity, set[str]]] = {}
    admitted: dict[tuple[str, int], int] = {(name, 0): 0 for name in names}
    now = 0.0
    for action, which, other in steps:
        now += 1.0
        name, voter = names[which % size], names[other % size]
        if action < 2:  # a member loses another
            if name != voter and members[voter].find(name).state is State.ALIVE:  # type: ignore[union-attr]  # there is one
                lose(members[voter], name, now)
        elif action < 4:  # a process wants to be `name`
            generation = 1 + max(members[each].known_generation(identity(name, -1)) for each in {voter})
            candidates[next(incarnations)] = identity(name, 0, generation), set()
        elif candidates:  # a candidate asks a member
            incarnation = sorted(candidates)[which % len(candidates)]
            wanted, voters = candidates[incarnation]
            me = wanted._replace(incarnation=incarnation)
            if voter != me.name and not members[voter].vote(me, now):
                voters.add(voter)
            if members[voter].is_quorum(me.name, voters):
                assert admitted.setdefault((me.name, me.generation), incarnation) == incarnation
                del candidates[incarnation]
                replaced = Membership(me, now)
                for each in names:
                    if each != me.name:
                        replaced.add(members[each].find(each).identity, now)  # type: ignore[union-attr]  # as above
                for each in voters:
                    replaced.merge(members[each].votes().items())
                    if members[each].admit(me, now) is Admission.DISPLACES:
                        lose(members[each], me.name, now)
                        assert members[each].admit(me, now) is Admission.REPLACES
                members[me.name] = replaced


class Formed:
    """The members of a group that counts how often all of them are asked for."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.walks = 0

    def find(self, name: str) -> Identity | None:
        return Identity(name, self._names.index(name), 100, 0) if name in self._names else None

    def __iter__(self) -> Iterator[Identity]:
        self.walks += 1
        return (Identity(name, number, 100, 0) for number, name in enumerate(self._names))


def test_members_of_a_formed_group_are_looked_up_when_they_are_needed() -> None:
    formed = Formed("a", "b", "c", "d")
    membership = Membership(Identity("a", 0, 100, 0), 5.0)
    membership.form(formed)
    assert membership.find("x") is None
    assert membership.find("c") == Member(Identity("c", 2, 100, 0), State.ALIVE, 5.0)
    assert membership.gone("b", 100, State.LOST, 7.0)
    assert membership.admit(Identity("b", 1, 7, 1), 8.0) is Admission.REPLACES
    with pytest.raises(NotAdmitted, match="no worker 'x'"):
        membership.admit(Identity("x", 9, 1, 0), 8.0)
    assert formed.walks == 0
    assert [(member.identity.name, member.identity.incarnation) for member in membership.members()] == [
        ("a", 100),
        ("b", 7),
        ("c", 100),
        ("d", 100),
    ]
    assert membership.is_quorum("b", ["a", "c", "d"])
    assert not membership.is_quorum("b", ["c", "d"])
    assert formed.walks == 1
