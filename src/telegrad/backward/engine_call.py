"""One call of torch's engine: which inputs it gets, so that gradients of leaves go where the pass wants them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from telegrad.backward import anomaly
from telegrad.backward.accumulate import AccumulateThrough
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.grad_slots import Wait
from telegrad.backward.graph import PassGraph, Roots, start_of
from telegrad.backward.inputs import capturing
from telegrad.backward.islands import Island
from telegrad.backward.nodes import ANCHOR_NODE, RECV_NODE, new_anchor, own_anchor
from telegrad.execution.autocast import enter_autocast
from telegrad.interrupts import interruptible
from telegrad.protocol.backward import ROOT
from telegrad.torch_private import gradient_edge, post_accumulate_hooks, run_backward
from telegrad.wire.messages import ANOMALY, CHECK_NAN, INTO_CONTEXT, INTO_GRAD, NOWHERE, PassInfo

Outputs = Sequence[torch.Tensor | GradientEdge]
Grads = Sequence[torch.Tensor | None]

edge: Callable[[tuple[Node | None, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)
"""Makes a GradientEdge. Its own constructor is a Python function, too slow for what is done once per leaf."""
_ANCHOR = GradientEdge(ANCHOR_NODE, 0)
_UNREACHED = gradient_edge(new_anchor())  # in no graph


class EngineCall(msgspec.Struct, eq=False):
    """Calls the engine for islands of one pass."""

    graph: PassGraph
    context: DistAutogradContext
    info: PassInfo
    through: AccumulateThrough
    hooks: bool
    """Whether hooks on AccumulateGrad run, too."""

    def run(
        self, island: Island, outputs: Outputs, grads: Grads, reached: dict[Any, set[int]], wait: Wait
    ) -> Sequence[torch.Tensor | None]:
        """Run an island from these outputs. Returns gradients that were captured, if the pass wants them."""
        leaves = self.info.leaves
        if leaves == INTO_GRAD:
            self._backward(outputs, grads, (), True)
            return ()
        if leaves == INTO_CONTEXT:
            # A multi-grad hook does not see a leaf whose gradient is captured.
            through = self.hooks or island.tied
            edges: list[GradientEdge] = []
            node: Any
            for node in island.leaves:
                edges.append(edge((node, 0, None)))
                if post_accumulate_hooks(node.variable):
                    through = True
            if island.reached:
                edges.append(_ANCHOR)
            if through:
                with self.through.into(self.context.gradients, list(island.leaves), wait):
                    self._backward(outputs, grads, edges, True)
                return ()
            return self._backward(outputs, grads, edges, False)
        return self._run_needed(island, outputs, grads, reached, wait)

    def _run_needed(
        self, island: Island, outputs: Outputs, grads: Grads, reached: dict[Any, set[int]], wait: Wait
    ) -> Sequence[torch.Tensor | None]:
        """Run what leads to inputs, as torch does: the nodes between the outputs, the inputs, and needed recvs."""
        roots, numbers = self.graph.roots, sorted(island.wanted)
        onward = [edge((*own_anchor(node), None)) for node in reached]
        if roots is None or not numbers:
            if not onward:
                if roots is None or len(roots.tensors) > 1 or ROOT not in island.entries:
                    return ()
                onward = [_UNREACHED]  # hooks of a single root run in any case
            self._backward(outputs, grads, onward, False)
            return ()
        edges = [roots.inputs[number] for number in numbers]
        tensors = {number: roots.input_tensors[number] for number in numbers}
        inner = {number: tensor for number, tensor in tensors.items() if not tensor.is_leaf}
        if roots.into == NOWHERE:
            return self._capture(roots, outputs, grads, numbers, inner, onward, reached)
        # The engine executes inputs, too, except leaves whose gradients can be captured.
        if roots.into == INTO_CONTEXT and not inner and not island.tied:
            return self._backward(outputs, grads, [*edges, *onward], False)
        node: Any
        for node, *_ in edges:
            if type(node) is RECV_NODE and node not in reached:
                self.graph.reached[node.recv.message] = set()  # it has nothing to send
        if roots.into == INTO_GRAD:
            self._backward(outputs, grads, [*tensors.values(), *onward], True)
            return ()
        with capturing(inner) as captured, self.through.into(self.context.gradients, list(island.leaves), wait):
            self._backward(outputs, grads, [*edges, *onward], True)
        return [captured.get(number) for number in numbers]

    def _capture(
        self,
        roots: Roots,
        outputs: Outputs,
        grads: Grads,
        numbers: Sequence[int],
        inner: dict[int, torch.Tensor],
        onward: Sequence[GradientEdge],
        reached: dict[Any, set[int]],
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of these inputs as torch captures them: after their hooks, unless inputs lie behind.

        To the engine, whatever leads to one output of a recv leads to all of them.
        """
        needs = self.graph.needs
        assert needs is not None
        edges = [roots.inputs[number] for number in numbers]
        if all(len(leading) == node.recv.count for node, leading in reached.items()) and not any(
            _has_siblings(input_edge.node) for input_edge in edges
        ):
            return self._backward(outputs, grads, [*edges, *onward], False)
        last = {number: inner[number] for number in inner if not needs.leads_on(roots.inputs[number])}
        with capturing(last) as after_hooks:
            captured = self._backward(outputs, grads, [*edges, *onward], False)
        return [after_hooks.get(number, grad) for number, grad in zip(numbers, captured, strict=False)]

    @interruptible
    def _backward(
        self, outputs: Outputs, grads: Grads, inputs: Outputs, accumulate: bool
    ) -> Sequence[torch.Tensor | None]:
        info = self.info
        create = info.create_graph
        retain = info.retain_graph or create
        if info.autocast is None and not info.modes & ANOMALY:
            return run_backward(tuple(outputs), tuple(grads), retain, create, tuple(inputs), True, accumulate)
        run = partial(run_backward, tuple(outputs), tuple(grads), retain, create, tuple(inputs), True, accumulate)
        return self._in_modes(run, outputs)

    def _in_modes(
        self, run: Callable[[], Sequence[torch.Tensor | None]], outputs: Outputs
    ) -> Sequence[torch.Tensor | None]:
        """Run the engine in the autocast and anomaly modes of the pass. Only the engine may be interrupted."""
        info = self.info
        with contextlib.ExitStack() as modes:
            if info.autocast is not None:
                modes.enter_context(enter_autocast(info.autocast))
            if info.modes & ANOMALY:
                check_nan = bool(info.modes & CHECK_NAN) and not anomaly.is_checking()
                modes.enter_context(anomaly.watched([start_of(output) for output in outputs], check_nan))
            return _run_engine(run)


def _has_siblings(node: Any) -> bool:
    """Whether an input that this node makes came in a message with other tensors."""
    return type(node) is RECV_NODE and node.recv.count > 1


@interruptible
def _run_engine(run: Callable[[], Sequence[torch.Tensor | None]]) -> Sequence[torch.Tensor | None]:
    return run()
