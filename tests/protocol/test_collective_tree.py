"""The tree of a collective: everybody has one way to the root, whoever is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.collective_tree import FAN_OUT, Tree, static_children, static_parent, subtree

sizes = st.integers(1, 80)
fan_outs = st.integers(1, 5)


@given(sizes, fan_outs)
def test_every_member_but_the_first_has_one_parent(size: int, fan_out: int) -> None:
    below = [child for member in range(size) for child in static_children(member, size, fan_out)]
    assert below == list(range(1, size))
    for member in range(1, size):
        assert member in static_children(static_parent(member, fan_out), size, fan_out)


@given(sizes, fan_outs, st.integers(0, 79))
def test_a_subtree_has_the_member_and_all_below_it(size: int, fan_out: int, top: int) -> None:
    def is_below(member: int) -> bool:
        while member > top:
            member = static_parent(member, fan_out)
        return member == top

    if top < size:
        assert sorted(subtree(top, size, fan_out)) == [member for member in range(size) if is_below(member)]


def test_a_small_group_is_a_star_and_a_large_one_is_not_deep() -> None:
    assert len(static_children(0, FAN_OUT + 1)) == FAN_OUT
    member, depth = 9_999, 0
    while member:
        member, depth = static_parent(member), depth + 1
    assert depth == 4


@given(sizes, fan_outs, st.data())
def test_whoever_is_gone_the_others_have_one_way_to_the_root(size: int, fan_out: int, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, size - 1)))
    tree = Tree(size, gone.__contains__, fan_out)
    alive = [member for member in range(size) if member not in gone]
    assert tree.root() == (alive[0] if alive else None)
    for member in alive:
        children = tree.children(member)
        assert len(set(children)) == len(children)
        assert all(tree.parent(child) == member for child in children)
        seen, above = [member], tree.parent(member)
        while above is not None:
            assert above not in gone
            assert above not in seen, "a cycle"
            seen.append(above)
            above = tree.parent(above)
        assert seen[-1] == alive[0]
    assert sorted(child for member in alive for child in tree.children(member)) == alive[1:]


@given(sizes, fan_outs, st.data())
def test_every_member_that_is_gone_is_between_one_parent_and_its_children(
    size: int, fan_out: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    tree = Tree(size, gone.__contains__, fan_out)
    between = [other for member in range(size) if member not in gone for other in tree.gone_between(member)]
    assert sorted(between) == sorted(gone)
