"""Passes with inputs: which nodes of this worker's graph they need, and how the inputs get their gradients.

The rules of the search are in `telegrad.protocol.input_paths`. This module applies them to torch's graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.islands import Start
from telegrad.backward.nodes import RECV_NODE, Recv, SendRpcBackward
from telegrad.protocol.backward import ROOT
from telegrad.protocol.input_paths import InputPaths, Origin, ReceivedTensor, Vertex
from telegrad.torch_private import engine_task


class Found(msgspec.Struct, eq=False):
    """What a walk of the probe found that other workers have to know."""

    ask: dict[Recv, set[int]] = msgspec.field(default_factory=dict)
    """Received tensors that the walk reached. Their senders continue it."""
    tell: dict[SendRpcBackward, set[int]] = msgspec.field(default_factory=dict)
    """Sent tensors that lead to an input. Their receivers must know."""


class Needs:
    """What one pass needs of this worker's graph. Used under the lock of the pass."""

    def __init__(self, context: DistAutogradContext, inputs: Sequence[GradientEdge]) -> None:
        self._context = context
        self._recvs: dict[int, Any] = {}
        self._sends: dict[int, SendRpcBackward] = {}
        # Not a method of this object, which would be a reference cycle: it would keep the graph after the pass.
        self._paths = InputPaths(
            partial(_below, self._recvs), {_place(self._recvs, edge.node, edge.output_nr) for edge in inputs}
        )
        # A tensor received before all inputs cannot lead to one: nothing that depends on an input had been sent.
        self._first = min((_order_of(edge.node) for edge in inputs), default=0)
        self.tensors: dict[int, set[int]] = {}
        """Sent tensors that lead to an input."""

    # -- the search ---------------------------------------------------------------------------------------------

    def from_roots(self, starts: Iterable[Start]) -> Found:
        """Walk from the roots."""
        return self._walk((ROOT, _place(self._recvs, *start)) for start in starts)

    def from_sent(self, send: SendRpcBackward, tensors: Sequence[int]) -> Found:
        """Walk from these tensors of a send. Gradients will come for them if they lead to an input."""
        self._sends[send.message] = send
        starts = zip(tensors, send.edges(tensors), strict=True)
        return self._walk(((send.message, index), _place(self._recvs, *start)) for index, start in starts)

    def mark_leading(self, message: int, tensors: Iterable[int]) -> Found:
        """Note that these tensors of a received message lead to an input, as its sender says."""
        return self._found([], self._paths.mark_leading((message, index) for index in tensors))

    def _walk(self, starts: Iterable[tuple[Origin, Vertex]]) -> Found:
        return self._found(*self._paths.walk(starts))

    def _found(self, asked: list[ReceivedTensor], told: list[Origin]) -> Found:
        found = Found()
        for message, index in asked:
            recv: Recv = self._recvs[message].recv
            if recv.order <= self._first:
                continue
            if recv.context is None or recv.context() is not self._context:
                # No worker knows whether it leads to an input, so the pass must reach it, and fails there.
                told += self._paths.mark_leading([(message, index)])
            else:
                found.ask.setdefault(recv, set()).add(index)
        for origin in told:
            if origin != ROOT:
                message, index = origin  # type: ignore[misc]  # sent tensors are pairs
                self.tensors.setdefault(message, set()).add(index)
                found.tell.setdefault(self._sends[message], set()).add(index)
        return found

    # -- what it found ------------------------------------------------------------------------------------------

    def nodes(self) -> set[Node]:
        """Return the needed nodes. A recv is needed if one of its outputs is."""
        return {self._recvs[place[0]] if isinstance(place, tuple) else place for place in self._paths.needed}  # type: ignore[misc]  # else a node

    def leading(self, reached: dict[Any, set[int]]) -> dict[Any, set[int]]:
        """Return those of these recvs that lead to an input, and which of their outputs do."""
        found, onward = {}, self._paths.leading
        for node, outputs in reached.items():
            leading = {index for index in outputs if (node.recv.message, index) in onward}
            if leading:
                found[node] = leading
        return found

    def leads_on(self, edge: GradientEdge) -> bool:
        """Whether an input is also needed for others behind it."""
        place = _place(self._recvs, edge.node, edge.output_nr)
        if isinstance(place, tuple):
            return place in self._paths.leading
        return any(below in self._paths.needed for below in _below(self._recvs, place))


def _place(recvs: dict[int, Any], node: Node, index: int) -> Vertex:
    """Return the vertex of an output of a node. Nodes of recvs are noted in `recvs`, by message."""
    if type(node) is not RECV_NODE:
        return node
    recv_node: Any = node
    message: int = recv_node.recv.message
    recvs[message] = node
    return message, index


def _below(recvs: dict[int, Any], place: Any) -> list[Vertex]:
    return [_place(recvs, node, index) for node, index in place.next_functions if node is not None]


def _order_of(node: Any) -> int:
    """Return when a received tensor came, in this worker's record order; 0 for any other tensor."""
    return node.recv.order if type(node) is RECV_NODE else 0


@contextlib.contextmanager
def capturing(tensors: dict[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor | None]]:
    """Capture the gradients that the engine computes for these on this thread in the block, after all their hooks.

    The block runs the engine once. Hooks and Functions in it may run the engine again, through the same tensors.
    """
    thread = get_ident()
    captured: dict[int, torch.Tensor | None] = {}
    tasks: dict[int, int] = {}  # the run of the engine in which each was captured

    def capture(number: int, grad: torch.Tensor | None) -> None:
        if get_ident() != thread:  # it is a pass of another context
            return
        task = engine_task()
        if task <= tasks.get(number, task):  # else it is a run inside the run of the block, which has a later number
            captured[number], tasks[number] = grad, task

    handles = []
    for number, tensor in tensors.items():
        handles.append(tensor.register_hook(partial(capture, number)))  # type: ignore[no-untyped-call]  # torch has no types for it
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
