"""Reads Slurm's lists of nodes and of tasks, as in ``n[01-03,7],login1`` and ``2(x3),1``, without scontrol."""

from __future__ import annotations

import re
from collections.abc import Iterator

from telegrad.errors import RendezvousError

_MAX_NODES = 1 << 20  # more than any cluster has
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodelist: str) -> list[str]:
    """Return the nodes that a list names, in order.

    >>> expand("n[08-10],login1")
    ['n08', 'n09', 'n10', 'login1']
    >>> expand("rack[1-2]-node[1,3]")
    ['rack1-node1', 'rack1-node3', 'rack2-node1', 'rack2-node3']
    """
    return [node for item in _split(nodelist) for node in _expand_item(item, nodelist)]


def first(nodelist: str) -> str:
    """Return the first node of a list.

    >>> first("gpu[003-127]")
    'gpu003'
    """
    for item in _split(nodelist):
        for node in _expand_item(item, nodelist):
            return node
    raise _invalid(nodelist)


def tasks_of_node(tasks_per_node: str, node: int) -> int | None:
    """Return how many tasks the node with this number has, or None if the list does not say.

    >>> [tasks_of_node("2(x3),1", node) for node in range(5)]
    [2, 2, 2, 1, None]
    """
    for item in tasks_per_node.split(","):
        match = _TASKS.fullmatch(item)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _split(nodelist: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, item = 0, ""
    for character in nodelist:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _invalid(nodelist)
        if character == "," and depth == 0:
            yield item
            item = ""
        else:
            item += character
    if depth or not item:
        raise _invalid(nodelist)
    yield item


def _expand_item(item: str, nodelist: str) -> Iterator[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        if not item:
            raise _invalid(nodelist)
        yield item
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < _MAX_NODES):
            raise _invalid(nodelist)
        for number in range(int(low), int(high) + 1):
            start = f"{before}{number:0{len(low)}d}"
            if after:
                yield from (start + end for end in _expand_item(after, nodelist))
            else:
                yield start


def _invalid(nodelist: str) -> RendezvousError:
    return RendezvousError(
        f"this list of nodes from Slurm cannot be read: {nodelist!r}; set MASTER_ADDR to rank 0's host"
    )
