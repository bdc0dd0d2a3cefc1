"""Describes the graph of an autograd context on this worker, and how far a pass has come in it.

The walk takes a snapshot under the locks of the context and its pass, and then reads torch's nodes without a lock: the
edges of a node do not change. While it runs it keeps the graph alive.

The graph of a loss is visible while a pass runs from it. Before, nothing but the program refers to it: the worker shows
what was sent, and what was received.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import torch

from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.graph import start_of
from telegrad.backward.islands import Start
from telegrad.backward.nodes import RECV_NODE, Recv, SendRpcBackward
from telegrad.backward.pass_run import PassRun
from telegrad.observe.model import Node
from telegrad.protocol.backward import ROOT
from telegrad.torch_private import no_torch_function

MOST_NODES = 2000

WAITS, RUNS, DONE, SKIPPED = "waits", "runs", "done", "skipped"
"""States of nodes in a pass, from the least to the most informative."""


def nodes_of(context: DistAutogradContext, limit: int = MOST_NODES) -> tuple[Node, ...]:
    """Return torch's graph of a context on this worker, from what was sent and the roots of a pass to leaves and recvs.

    After `limit` nodes the walk stops; a node named ``...`` stands for the rest.
    """
    with context.lock:
        sends, recvs = list(context.sends.values()), list(context.recvs.values())
        runs = list(context.passes.values())
    progress = _progress(runs[-1]) if runs else _Progress()
    walk = _Walk(limit)
    walk.enter("backward()", progress.roots, progress.state_of(ROOT))
    for send in sends:
        walk.enter("SendRpcBackward", _edges(send), progress.state_of(send.message), sends=send.message)
    for recv in recvs:
        if recv.node is not None:
            walk.number(recv.node)
    return walk.nodes(progress)


class _Progress(msgspec.Struct):
    """How far a pass has come, at one moment."""

    roots: Sequence[Start] = ()
    started: frozenset[Hashable] = frozenset()
    """Entries of islands that have started."""
    fed: dict[Hashable, bool] = {}
    """Entries that have arrived, and whether their gradients are used up."""
    expected: frozenset[int] = frozenset()
    """Recvs that the engine will execute."""
    over: bool = True
    known: bool = False

    def state_of(self, entry: Hashable) -> str:
        """Return the state of what an entry leads to."""
        if not self.known:
            return ""
        if entry in self.started:
            return DONE if self.over or self.fed.get(entry, False) else RUNS
        return SKIPPED if self.over else WAITS


def _progress(run: PassRun) -> _Progress:
    with run.lock:
        roots = run.graph.roots
        starts = [start_of(tensor) for tensor in roots.tensors] if roots is not None else []
        fed: dict[Hashable, bool] = {message: fed.grads is None for message, fed in run.graph.fed.items()}
        started = frozenset(run.rules.started_entries())
        # Nothing says that the island of the roots has ended, but that fewer run than those of which this is known.
        others = sum(
            ROOT not in island.entries
            and any(entry in started and not fed.get(entry, True) for entry in island.entries)
            for island in run.graph.islands.values()
        )
        fed[ROOT] = run.rules.running <= others
        over = run.over or run.failure is not None or not run.rules.engaged
        return _Progress(starts, started, fed, frozenset(run.graph.reached), over, known=True)


class _Walk:
    """Numbers the nodes that it meets, in a fixed order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: dict[Any, int] = {}  # keeps the nodes, so their identities stay theirs
        self._states: dict[int, str] = {}
        self._entries: list[Node] = []
        self._rest = 0  # the number of the node that stands for what is left out
        self._next = 1

    def number(self, node: Any) -> int:
        """Return the number of a node of torch's."""
        number = self._numbers.get(node)
        if number is None:
            if len(self._numbers) + len(self._entries) >= self._limit:
                if not self._rest:
                    self._rest, self._next = self._next, self._next + 1
                return self._rest
            number = self._numbers[node] = self._next
            self._next += 1
        return number

    def enter(self, name: str, edges: Sequence[Start], state: str, *, sends: int = 0) -> None:
        """Walk from an entry. What it reaches first has its state."""
        if not edges and not sends:
            return
        number, self._next = self._next, self._next + 1
        inputs = [self.number(node) for node, _ in edges if node is not None]
        self._entries.append(Node(number, name, tuple(dict.fromkeys(inputs)), sends=sends, state=state))
        stack = [node for node, _ in edges if node is not None]
        while stack:
            node = stack.pop()
            place = self._numbers.get(node)
            if place is None or place in self._states:
                continue
            self._states[place] = state
            if type(node) is not RECV_NODE:
                for following, _ in node.next_functions:
                    if following is not None:
                        self.number(following)
                        stack.append(following)

    def nodes(self, progress: _Progress) -> tuple[Node, ...]:
        """Return all nodes that were met."""
        found = list(self._entries)
        for node, number in self._numbers.items():
            state = self._states.get(number, "")
            if type(node) is RECV_NODE:
                recv: Recv = node.recv
                if progress.known and state in (RUNS, DONE):
                    state = RUNS if recv.message in progress.expected else DONE
                found.append(Node(number, "RecvRpcBackward", receives=recv.message, state=state))
                continue
            inputs = [self.number(following) for following, _ in node.next_functions if following is not None]
            leaf = getattr(node, "variable", None)
            shape = describe_leaf(leaf) if leaf is not None and not inputs else ""
            found.append(
                Node(number, node.name().rpartition("::")[2], tuple(dict.fromkeys(inputs)), leaf=shape, state=state)
            )
        if self._rest:
            found.append(Node(self._rest, "..."))
        return tuple(sorted(found, key=lambda node: node.id))


def _edges(send: SendRpcBackward) -> list[Start]:
    return list(send.next_functions)


def describe_leaf(tensor: torch.Tensor) -> str:
    """Return the type and shape of a tensor.

    >>> describe_leaf(torch.zeros(3, 4))
    'float32[3, 4]'
    """
    with no_torch_function():  # a subclass of the user's must not notice
        return type_and_shape(tensor.dtype, tensor.shape)


def type_and_shape(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the type and shape of a tensor for people.

    >>> type_and_shape(torch.int64, (2,))
    'int64[2]'
    """
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
