"""The tree along which the values of a collective travel: up to the root, and the outcome back down.

Members are numbered by id. The children of member i are i * FAN_OUT + 1 to i * FAN_OUT + FAN_OUT, so a group of up to
FAN_OUT + 1 members is a star around the first. Nobody has more than FAN_OUT children, and nobody is further from the
root than the logarithm of the group.

The collectives of a program use this *static* tree: if one of its members is lost, they fail. A shutdown goes on
without workers that are gone, by three rules:

1. The parent of a worker is the nearest one above it that is not gone. So the children of a worker that is gone become
   those of its parent.
2. If all above it are gone, its parent is the worker with the lowest number that is not gone: the root.
3. A worker takes values from its children only, as it knows the group itself. Whoever it does not hold for its child
   has to ask again, until both know the same.

By rules 1 and 2 every worker that is not gone, except the root, has exactly one parent, and following parents leads to
the root. So if all know the same, each value is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

FAN_OUT = 16
"""How many children a member has at most, while nobody is gone."""


def static_parent(member: int, fan_out: int = FAN_OUT) -> int:
    """Return the member above this one, which must not be 0."""
    return (member - 1) // fan_out


def static_children(member: int, size: int, fan_out: int = FAN_OUT) -> range:
    """Return the members below this one."""
    first = member * fan_out + 1
    return range(min(first, size), min(first + fan_out, size))


def subtree(member: int, size: int, fan_out: int = FAN_OUT) -> Iterator[int]:
    """Return the member and all below it, by level.

    >>> list(subtree(1, 12, fan_out=2))
    [1, 3, 4, 7, 8, 9, 10]
    """
    level = range(member, member + 1)
    while level:
        yield from level
        level = range(static_children(level[0], size, fan_out).start, static_children(level[-1], size, fan_out).stop)


class Tree:
    """The tree of a shutdown, as one worker knows it."""

    def __init__(self, size: int, is_gone: Callable[[int], bool], fan_out: int = FAN_OUT) -> None:
        self._size = size
        self._is_gone = is_gone
        self._fan_out = fan_out

    def root(self) -> int | None:
        """Return the root; None if all are gone."""
        return next((member for member in range(self._size) if not self._is_gone(member)), None)

    def parent(self, member: int) -> int | None:
        """Return the parent of a member; None if it is the root."""
        above = member
        while above:
            above = static_parent(above, self._fan_out)
            if not self._is_gone(above):
                return above
        root = self.root()
        return None if root == member else root

    def children(self, member: int) -> list[int]:
        """Return the members whose parent this one is."""
        found = self.nearest(static_children(member, self._size, self._fan_out))
        if member and self.parent(member) is None:
            found += [other for other in self.nearest([0]) if other != member]
        return found

    def nearest(self, members: Iterable[int]) -> list[int]:
        """Return those of the members that are not gone, and in place of each other one the nearest below it."""
        found, open_ = [], list(members)
        while open_:
            member = open_.pop()
            if self._is_gone(member):
                open_.extend(static_children(member, self._size, self._fan_out))
            else:
                found.append(member)
        return found

    def gone_between(self, member: int) -> list[int]:
        """Return the members that are gone and whose place below this one its children have taken."""
        starts = list(static_children(member, self._size, self._fan_out))
        if member and self.parent(member) is None:
            starts.append(0)
        found = []
        while starts:
            other = starts.pop()
            if self._is_gone(other):
                found.append(other)
                starts.extend(static_children(other, self._size, self._fan_out))
        return found
