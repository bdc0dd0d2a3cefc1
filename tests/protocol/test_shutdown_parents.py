"""Who reports to whom in a shutdown, while workers know different groups."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.protocol.collective_tree import Tree
from telegrad.protocol.shutdown_parents import DETACH, GIVE_UP, INSIST, ShutdownParents

PARENT, CHILD = 11, 22


def test_a_worker_avoids_those_that_have_detached_it_until_another_sends_it_away() -> None:
    parents = ShutdownParents()
    parents.sent_away(PARENT, detached=True, asked=0.0, now=5.0)
    parents.sent_away(12, detached=True, asked=5.0, now=6.0)
    assert parents.avoided == {PARENT, 12}
    parents.sent_away(13, detached=False, asked=6.0, now=6.0)
    assert parents.avoided == frozenset()


def test_a_worker_that_is_sent_away_for_long_insists() -> None:
    parents = ShutdownParents()
    assert not parents.insists(1000.0)
    parents.sent_away(PARENT, detached=False, asked=1.0, now=1.0)
    parents.sent_away(PARENT, detached=False, asked=1.1, now=1.1)
    assert not parents.insists(1.0 + INSIST - 0.1)
    assert parents.insists(1.0 + INSIST)


def test_a_worker_that_had_been_taken_does_not_insist_at_once() -> None:
    parents = ShutdownParents()
    parents.sent_away(PARENT, detached=False, asked=1.0, now=1.0)
    parents.sent_away(PARENT, detached=False, asked=1.1, now=500.0)
    assert not parents.insists(500.0 + INSIST - 0.1)
    assert parents.insists(500.0 + INSIST)


def test_a_child_that_reports_elsewhere_for_some_seconds_is_given_up_until_it_comes() -> None:
    parents = ShutdownParents()
    assert not parents.said(CHILD, reports_here=False, now=1.0)
    assert parents.doubtful
    assert not parents.said(CHILD, reports_here=True, now=1.0 + GIVE_UP)
    assert not parents.doubtful
    assert not parents.said(CHILD, reports_here=False, now=10.0)
    assert parents.said(CHILD, reports_here=False, now=10.0 + GIVE_UP)
    assert parents.elsewhere == {CHILD}
    parents.came(CHILD, insists=False)
    assert not parents.elsewhere


def test_what_a_child_said_that_is_not_asked_any_more_does_not_count() -> None:
    """It died, or is the child of another: nobody has to be asked soon because of it."""
    parents = ShutdownParents()
    parents.said(CHILD, reports_here=False, now=1.0)
    parents.said(33, reports_here=False, now=1.0)
    parents.asks({CHILD})
    assert parents.doubtful
    parents.asks({33})
    assert not parents.doubtful
    assert not parents.said(CHILD, reports_here=False, now=100.0)
    assert not parents.said(33, reports_here=False, now=100.0)


def test_a_worker_that_insisted_is_a_child_until_it_comes_as_another_or_not_at_all() -> None:
    parents = ShutdownParents()
    parents.came(CHILD, insists=True)
    assert parents.adopted == {CHILD}
    parents.came(CHILD, insists=False)
    assert not parents.adopted
    parents.came(CHILD, insists=True)
    parents.said(CHILD, reports_here=False, now=1.0)
    assert parents.said(CHILD, reports_here=False, now=1.0 + GIVE_UP)
    assert (parents.adopted, parents.elsewhere) == (set(), set())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 3))
def test_everybody_is_awaited_by_the_one_that_it_reports_to_and_by_nobody_else(
    seed: int, size: int, fan_out: int
) -> None:
    draw = random.Random(seed)
    lost = {frozenset(draw.sample(range(size), 2)) for _ in range(draw.randint(0, size))} if size > 1 else set()
    rules = [ShutdownParents() for _ in range(size)]

    def tree(me: int) -> Tree:
        root = Tree(size, lambda other: frozenset((me, other)) in lost, fan_out).root()
        avoided = rules[me].avoided - {root}
        return Tree(size, lambda other: frozenset((me, other)) in lost or other in avoided, fan_out)

    def awaited(me: int) -> set[int]:
        below = set(tree(me).children(me)) | rules[me].adopted
        return {other for other in below if frozenset((me, other)) not in lost} - rules[me].elsewhere

    asked = dict.fromkeys(range(size), 0.0)
    now = 0.0
    while now < 3 * GIVE_UP:
        for me in draw.sample(range(size), size):
            parent = tree(me).parent(me)
            if parent is None:
                continue
            assert parent < me
            rules[parent].came(me, insists=rules[me].insists(now))
            above, known = tree(parent).parent(parent), tree(me).parent(parent)
            if me not in awaited(parent):
                rules[me].sent_away(parent, detached=False, asked=asked[me], now=now)
                asked[me] = now
            elif known is not None and above != known and now - asked[me] >= DETACH and not rules[me].insists(now):
                rules[me].sent_away(parent, detached=True, asked=asked[me], now=now)
                asked[me] = now
        for me in range(size):
            for other in awaited(me):
                rules[me].said(other, reports_here=tree(other).parent(other) == me, now=now)
        now += 1.0
    parents = {me: tree(me).parent(me) for me in range(size)}
    for me in range(size):
        assert awaited(me) == {other for other, parent in parents.items() if parent == me}
