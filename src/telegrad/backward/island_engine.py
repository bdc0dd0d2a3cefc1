"""Runs an island with torch's engine: what the engine begins with, and what becomes of the gradients it captures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from telegrad.backward import islands
from telegrad.backward.accumulate import add_up
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.engine_call import EngineCall, Grads, Outputs, edge
from telegrad.backward.gates import chain_gates
from telegrad.backward.grad_slots import Wait
from telegrad.backward.graph import PassGraph, start_of
from telegrad.backward.islands import Island
from telegrad.backward.nodes import ONE, SendRpcBackward
from telegrad.protocol.backward import ROOT, Entry
from telegrad.torch_private import (
    backward_hooks,
    compiled_autograd_off,
    post_accumulate_hooks,
    profiled,
    sequence_number,
    set_sequence_number,
)
from telegrad.wire.messages import INTO_CONTEXT, PROFILED, PassInfo


class IslandEngine(msgspec.Struct, eq=False):
    """Torch's engine for the islands of one pass. Its methods are called without the lock of the pass."""

    graph: PassGraph
    context: DistAutogradContext
    info: PassInfo
    lock: Lock
    """The lock of the pass, which protects `PassGraph.captured`."""
    call: EngineCall

    def accumulate_directly(self, island: Island) -> bool:
        """Add gradients of leaves that were sent themselves to the context. Returns False if that needs the engine."""
        if self.info.leaves != INTO_CONTEXT or self.info.modes & PROFILED or profiled():
            return False  # a profiler should see the node of every send
        graph = self.graph
        message: Any = island.entries[0]
        fed = graph.fed.get(message)
        if fed is None or fed.grads is None:
            return False  # it is the root, which is never fed, or has a gate
        begin = island.begin
        if graph.known or len(fed.reached) != len(begin):  # gradients came for some of its leaves
            send = self.context.sends.get(message)
            if send is None:
                return False  # the context has just been left
            begin = send.edges(fed.reached)
        leaves, frozen = [], False
        node: Any
        for node, _ in begin:
            leaf = node.variable
            if backward_hooks(leaf) or post_accumulate_hooks(leaf):
                return False  # they were registered after the plan
            leaves.append(leaf)
            frozen = frozen or not leaf.requires_grad
        grads, indices = fed.grads, fed.reached
        if frozen:  # since they were sent
            kept = [(index, leaf) for index, leaf in zip(indices, leaves, strict=True) if leaf.requires_grad]
            indices, leaves = [index for index, _ in kept], [leaf for _, leaf in kept]
        for index, leaf in zip(indices, leaves, strict=True):
            grad, dtype = grads[index], leaf.grad_dtype
            if grad is not None and dtype is not None and grad.dtype is not dtype:
                grads[index] = grad.to(dtype)  # as the engine does
            del grad  # or it would be seen that somebody else holds it, and it would be copied
        gradients = self.context.gradients
        if len(leaves) > 1:
            gradients.add_all(leaves, grads, indices)
        elif leaves:
            gradients.add(leaves[0], grads, indices[0])
        return True

    def run(
        self,
        island: Island,
        waiting: Sequence[Entry],
        wait_for_gradient: Callable[[SendRpcBackward], None],
        wait_for_slot: Wait,
    ) -> Sequence[torch.Tensor | None]:
        """Run an island. Returns captured gradients, for `keep`.

        Gates call `wait_for_gradient`, and whoever needs ``.grad`` of a leaf `wait_for_slot`.
        """
        graph, roots = self.graph, self.graph.roots
        entered: tuple[Outputs, Grads] | None
        if roots is not None and len(island.entries) == 1 and island.entries[0] == ROOT:
            entered = roots.tensors, roots.grads
        else:
            entered = self._entered(island, waiting)
        if entered is not None:  # the short way to what follows, where everything runs that was planned
            for node, outputs_reached in island.reached.items():
                graph.reached[node.recv.message] = outputs_reached
            return self.call.run(island, entered[0], entered[1], island.reached, wait_for_slot)
        outputs: list[torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        gates: list[tuple[Callable[[], None], Sequence[torch.Tensor]]] = []
        planned = True  # whether everything runs that the plan walked over
        if ROOT in island.entries:
            assert roots is not None
            outputs += roots.tensors
            grads += roots.grads
        for send in self._sends_of(island):
            indices = graph.tensors_of(send)
            tokens = send.tokens(indices)
            whole = len(indices) == send.count
            if send.message in waiting:
                gates.append((partial(wait_for_gradient, send), tokens))
            else:
                graph.fed[send.message].give_to(send)
                outputs += tokens
                grads += [ONE] * len(tokens)
                planned = planned and whole
        if gates:
            outputs.append(chain_gates(gates))
            grads.append(ONE)
        elif not outputs:
            return ()
        reached = island.reached
        if gates or not planned:
            seen: set[Node] = set()
            reached = islands.reach([start_of(output) for output in outputs], seen)
            if gates:
                _raise_from_zero([*seen, *reached])
            if graph.needs is not None:
                reached = graph.needs.leading(reached)
        for node, outputs_reached in reached.items():
            graph.reached[node.recv.message] = outputs_reached
        if gates:
            # Compiled autograd ignores priorities, which gates rely on.
            with compiled_autograd_off():
                return self.call.run(island, outputs, grads, reached, wait_for_slot)
        return self.call.run(island, outputs, grads, reached, wait_for_slot)

    def _entered(
        self, island: Island, waiting: Sequence[Entry]
    ) -> tuple[list[GradientEdge], list[torch.Tensor]] | None:
        """Return the edges at which gradients of one send can be fed to the engine without its tokens, and those.

        Returns None if tokens are needed: for gates, for tensors that the engine must reach without a gradient, and
        for profilers, which show them.
        """
        graph = self.graph
        if waiting or graph.known or len(island.entries) != 1 or self.info.create_graph or not island.begin:
            return None
        if island.tied:
            return None  # the engine does not execute the node it begins with, which the multi-grad hook needs
        fed = graph.fed.get(island.entries[0])  # type: ignore[call-overload]  # ROOT is never fed
        if fed is None or fed.grads is None or len(fed.reached) != len(island.begin) or profiled():
            return None
        arrived, grads = fed.grads, []
        for index in fed.reached:
            grad = arrived[index]
            if grad is None:
                return None
            grads.append(grad)
        fed.grads = []  # handed over: the last one to get them may keep them without a copy
        edges = []
        for node, number in island.begin:
            edges.append(edge((node, number, None)))  # a comprehension would be one call more
        return edges, grads

    def _sends_of(self, island: Island) -> list[SendRpcBackward]:
        """Return the sends among an island's entries, in record order."""
        entries = island.entries
        with self.context.lock:
            sends = self.context.sends
            if len(entries) == 1:
                return [sends[entries[0]]]  # type: ignore[index]  # entries but ROOT are message ids
            found = [sends[entry] for entry in entries if entry != ROOT]  # type: ignore[index]  # as above
        found.sort(key=lambda send: send.order)
        return found

    def keep(self, island: Island, captured: Sequence[torch.Tensor | None]) -> None:
        """Put gradients that `run` captured where the pass wants them."""
        if self.info.leaves == INTO_CONTEXT:
            gradients = self.context.gradients
            node: Any
            for index, node in enumerate(island.leaves):
                leaf = node.variable
                if leaf.requires_grad:  # else it was frozen since, and AccumulateGrad does nothing
                    gradients.add(leaf, captured, index)
            return
        for number, grad in zip(sorted(island.wanted), captured, strict=False):
            if grad is not None:
                self._add_captured(number, grad)

    def _add_captured(self, number: int, grad: torch.Tensor) -> None:
        captured = self.graph.captured
        while True:
            with self.lock:
                other = captured[number]
                captured[number] = grad if other is None else None
            if other is None:
                return
            # Without the lock: gradients may be of a class whose sum runs user code.
            with torch.enable_grad():
                grad = add_up(other, grad)


def _raise_from_zero(nodes: Iterable[Node]) -> None:
    """Raise the priority of ordinary nodes that have the lowest one, which only gates may have."""
    for node in nodes:
        if sequence_number(node) == 0 and type(node).__name__ != "_GateBackward":
            set_sequence_number(node, 1)
