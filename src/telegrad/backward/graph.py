"""The graph's side of a pass on one worker: plans its islands, and runs them with torch's engine."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from telegrad.backward import anomaly, islands
from telegrad.backward.accumulate import AccumulateThrough, add_up
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.grad_slots import Wait
from telegrad.backward.inputs import Found, Needs, noting
from telegrad.backward.islands import Island
from telegrad.backward.nodes import (
    ANCHOR_NODE,
    ONE,
    RECV_NODE,
    SendRpcBackward,
    chain_gates,
    new_anchor,
    own_anchor,
)
from telegrad.backward.torch_private import (
    gradient_edge,
    profiled,
    run_backward,
    sequence_number,
    set_sequence_number,
)
from telegrad.errors import TelegradError
from telegrad.execution.autocast import enter_autocast
from telegrad.interrupts import interruptible
from telegrad.protocol.backward import ROOT, Entry
from telegrad.wire.messages import INTO_CONTEXT, INTO_GRAD, NOWHERE, PassInfo

# The constructor of a named tuple is a Python function, and dear for what is done once per leaf.
_edge: Callable[[tuple[Node | None, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)
_ANCHOR = GradientEdge(ANCHOR_NODE, 0)
_UNREACHED = gradient_edge(new_anchor())  # in no graph


class Roots(msgspec.Struct, eq=False):
    """Where the pass begins, and what its caller wants to have."""

    tensors: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    inputs: Sequence[GradientEdge] = ()
    tensors_in: Sequence[torch.Tensor] = ()
    """The inputs themselves, where their gradients are kept."""
    into: int = NOWHERE
    """Where those are kept."""


class Fed(msgspec.Struct, eq=False):
    """What arrived for one send."""

    grads: list[torch.Tensor | None] | None
    """None when they have been used."""
    reached: Sequence[int]


class PassGraph:
    """What one pass knows of this worker's graph."""

    __slots__ = (
        "_about",
        "_context",
        "_hooks",
        "_lock",
        "_numbers",
        "_seen",
        "_through",
        "captured",
        "fed",
        "islands",
        "known",
        "live",
        "needs",
        "reached",
        "roots",
    )

    def __init__(
        self,
        context: DistAutogradContext,
        about: PassInfo,
        roots: Roots | None,
        lock: Lock,
        through: AccumulateThrough,
        accumulate_hooks: bool,
    ) -> None:
        self._context = context
        self._about = about
        # The lock of the pass, which protects everything below. Its holder calls all methods but `run`.
        self._lock = lock
        self._through = through
        self._hooks = accumulate_hooks
        self._numbers = itertools.count()
        self._seen: set[Node] = set()
        self.roots = roots
        self.needs: Needs | None = None
        """In a pass with inputs: what it needs of this worker's graph, complete when the pass begins."""
        if about.leaves == NOWHERE:
            self.needs = Needs(context, roots.inputs if roots is not None else ())
        self.captured: list[torch.Tensor | None] = [None] * (len(roots.inputs) if roots is not None else 0)
        self.islands: dict[int, Island] = {}
        self.fed: dict[int, Fed] = {}
        self.live: dict[int, set[int]] = {}
        """The sent tensors that the probe has met."""
        self.known = False
        """The probe is over."""
        self.reached: dict[int, set[int]] = {}
        """Recvs that the engine is to execute, and which of their outputs; gone when it did. Without the lock, by
        single operations."""

    def let_go(self) -> None:
        """The pass is over where it began: do not keep the caller's graph."""
        self.roots = None
        for island in list(self.islands.values()):
            island.begin = ()

    # -- plan ---------------------------------------------------------------------------------------------------

    def plan(self, started: set[Entry]) -> dict[int, list[Entry]]:
        """Plan all entries but those that have started; returns the entries of every new island."""
        roots = self.roots
        starts: dict[Any, Sequence[islands.Start]] = {}
        wanted: dict[Node, list[int]] | None = None
        if roots is not None:
            if ROOT not in started:
                starts[ROOT] = [*map(start_of, roots.tensors)]
            if roots.inputs:
                wanted = {}
                for number, edge in enumerate(roots.inputs):
                    wanted.setdefault(edge.node, []).append(number)
        with self._context.lock:
            sends = list(self._context.sends.values())
        for send in sends:
            if send.message not in started:
                begin = send.edges(self.tensors_of(send))
                if begin:
                    starts[send.message] = begin
        # Hooks on AccumulateGrad cannot be seen from here, so where it is executed each leaf counts as having some.
        common = self._about.leaves == INTO_GRAD or self._hooks or (roots is not None and roots.into != NOWHERE)
        needs = self.needs
        needed = None if needs is None else needs.nodes()
        planned = {}
        for island in islands.plan(starts, leaves_are_common=common, wanted=wanted, needed=needed):
            if needs is not None:
                island.reached, island.last = needs.leading(island.reached), 0
            number = next(self._numbers)
            self.islands[number] = island
            planned[number] = island.entries
        return planned

    def grow(self, message: int) -> int:
        """An island for a send that was recorded after the plan; returns its number."""
        with self._context.lock:
            send = self._context.sends.get(message)
        if send is None:
            raise TelegradError(f"context {self._context.id:#x} was left")
        number = next(self._numbers)
        begin = send.edges(self.tensors_of(send))
        (self.islands[number],) = islands.plan({message: begin})
        return number

    def tensors_of(self, send: SendRpcBackward) -> Sequence[int]:
        """Which tensors of a send this pass runs: those reached; or alive; or, nothing being known yet, all."""
        fed = self.fed.get(send.message)
        if fed is not None:
            return fed.reached
        if self.needs is not None:
            return sorted(self.needs.tensors.get(send.message, ()))
        if self.known:
            return sorted(self.live.get(send.message, ()))
        return range(len(send.tokens))

    # -- the probe ----------------------------------------------------------------------------------------------

    def probe(self) -> Found:
        """Walk from the roots."""
        starts = [start_of(root) for root in self.roots.tensors] if self.roots is not None else []
        return self._probe_on(starts) if self.needs is None else self.needs.from_roots(starts)

    def meet(self, send: SendRpcBackward, tensors: Iterable[int]) -> Found:
        """The probe has met these tensors of a send: walk on from there."""
        named = {index for index in tensors if 0 <= index < len(send)}
        there = self.live.setdefault(send.message, set())
        fresh = sorted(named - there)
        there |= named
        return self._probe_on(send.edges(fresh)) if self.needs is None else self.needs.from_sent(send, fresh)

    def _probe_on(self, starts: Iterable[islands.Start]) -> Found:
        return Found({node.recv: indices for node, indices in islands.reach(starts, self._seen).items()})

    # -- the engine ---------------------------------------------------------------------------------------------

    def hand_over(self, island: Island) -> bool:
        """Give leaves that were sent as they are their gradients, which the engine has no part in; False: it has.

        Without the lock.
        """
        if self._about.leaves != INTO_CONTEXT or profiled():
            return False  # a profiler is to see the node of every send
        message: Any = island.entries[0]
        fed = self.fed.get(message)
        if fed is None or fed.grads is None:
            return False  # it is the root, which is never fed, or has a gate
        begin = island.begin
        if self.known or len(fed.reached) != len(begin):  # gradients came for some of its leaves
            send = self._context.sends.get(message)
            if send is None:
                return False  # the context has just been left
            begin = send.edges(fed.reached)
        leaves = []
        node: Any
        for node, _ in begin:
            leaf = node.variable
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False  # they have come since the plan
            leaves.append(leaf)
        add, grads = self._context.gradients.add, fed.grads
        for index, leaf in zip(fed.reached, leaves, strict=True):
            if leaf.requires_grad:  # else it was frozen since
                grad, dtype = grads[index], leaf.grad_dtype
                if grad is not None and dtype is not None and grad.dtype is not dtype:
                    grads[index] = grad.to(dtype)  # as the engine does
                del grad  # or it would not be the context's alone
                add(leaf, grads, index)
        return True

    def run(
        self,
        island: Island,
        waiting: Sequence[Entry],
        wait_for: Callable[[SendRpcBackward], None],
        wait_for_slot: Wait,
    ) -> Sequence[torch.Tensor | None]:
        """Run an island; returns what was captured, for `take`. Without the lock.

        Gates call `wait_for`, and who needs ``.grad`` of a leaf `wait_for_slot`.
        """
        entered = self._entered(island, waiting)
        if entered is not None:
            for node, outputs_reached in island.reached.items():
                self.reached[node.recv.message] = outputs_reached
            return self._run(island, *entered, island.reached, wait_for_slot)
        outputs: list[torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        gates: list[tuple[Callable[[], None], Sequence[torch.Tensor]]] = []
        planned = True  # whether everything runs that the plan walked over
        if ROOT in island.entries:
            assert self.roots is not None
            outputs += self.roots.tensors
            grads += self.roots.grads
        for send in self._sends_of(island):
            indices, tokens = self.tensors_of(send), send.tokens
            whole = len(indices) == len(tokens)
            if not whole:
                tokens = [tokens[index] for index in indices]
            if send.message in waiting:
                gates.append((partial(wait_for, send), tokens))
            else:
                send.set_grads(self.fed[send.message].grads)
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
            if self.needs is not None:
                reached = self.needs.leading(reached)
        for node, outputs_reached in reached.items():
            self.reached[node.recv.message] = outputs_reached
        if gates:
            with torch.autograd.set_multithreading_enabled(False), _compiled_autograd_off():
                return self._run(island, outputs, grads, reached, wait_for_slot)
        return self._run(island, outputs, grads, reached, wait_for_slot)

    def _entered(
        self, island: Island, waiting: Sequence[Entry]
    ) -> tuple[list[GradientEdge], list[torch.Tensor]] | None:
        """Where gradients of one send can be fed to the engine without its tokens, and those; None: they are needed.

        Tokens are for gates, for tensors that the engine is to reach without a gradient, and for profilers to see.
        """
        if waiting or self.known or len(island.entries) != 1 or self._about.create_graph or not island.begin:
            return None
        if island.tied:
            return None  # to a multi-grad hook, the engine does not execute a node that it begins with
        fed = self.fed.get(island.entries[0])  # type: ignore[call-overload]  # ROOT is never fed
        if fed is None or fed.grads is None or len(fed.reached) != len(island.begin) or profiled():
            return None
        there, grads = fed.grads, []
        for index in fed.reached:
            grad = there[index]
            if grad is None:
                return None
            grads.append(grad)
        fed.grads = []  # handed over: who gets them in the end may keep them without a copy
        edges = []
        for node, number in island.begin:
            edges.append(_edge((node, number, None)))  # a comprehension would be one call more
        return edges, grads

    def _sends_of(self, island: Island) -> list[SendRpcBackward]:
        """The sends among its entries, in record order."""
        entries = island.entries
        if len(entries) == 1 and entries[0] == ROOT:
            return []
        with self._context.lock:
            there = self._context.sends
            if len(entries) == 1:
                return [there[entries[0]]]  # type: ignore[index]  # entries but ROOT are message ids
            sends = [there[entry] for entry in entries if entry != ROOT]  # type: ignore[index]  # as above
        sends.sort(key=lambda send: send.order)
        return sends

    def _run(
        self,
        island: Island,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None],
        reached: dict[Any, set[int]],
        wait: Wait,
    ) -> Sequence[torch.Tensor | None]:
        leaves = self._about.leaves
        if leaves == INTO_GRAD:
            self._backward(outputs, grads, (), True)
            return ()
        if leaves == INTO_CONTEXT:
            # A multi-grad hook cannot be on a leaf whose gradient is captured.
            through = self._hooks or island.tied
            edges: list[GradientEdge] = []
            node: Any
            for node in island.leaves:
                edges.append(_edge((node, 0, None)))
                if node.variable._post_accumulate_grad_hooks:
                    through = True
            if island.reached:
                edges.append(_ANCHOR)
            if through:
                with self._through.into(self._context.gradients, list(island.leaves), wait):
                    self._backward(outputs, grads, edges, True)
                return ()
            return self._backward(outputs, grads, edges, False)
        return self._run_needed(island, outputs, grads, reached, wait)

    def _run_needed(
        self,
        island: Island,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None],
        reached: dict[Any, set[int]],
        wait: Wait,
    ) -> Sequence[torch.Tensor | None]:
        """Run what leads to inputs, as torch does: the nodes between the outputs, the inputs, and needed recvs."""
        roots, numbers = self.roots, sorted(island.wanted)
        onward = [_edge((*own_anchor(node), None)) for node in reached]
        if roots is None or not numbers:
            if not onward:
                if roots is None or len(roots.tensors) > 1 or ROOT not in island.entries:
                    return ()
                onward = [_UNREACHED]  # hooks of a single root run in any case
            self._backward(outputs, grads, onward, False)
            return ()
        edges = [roots.inputs[number] for number in numbers]
        tensors = {number: roots.tensors_in[number] for number in numbers}
        inner = {number: tensor for number, tensor in tensors.items() if not tensor.is_leaf}
        if roots.into == NOWHERE:
            return self._capture(outputs, grads, numbers, inner, onward, reached)
        # The engine executes inputs, too, but for leaves whose gradients can be captured.
        if roots.into == INTO_CONTEXT and not inner and not island.tied:
            return self._backward(outputs, grads, [*edges, *onward], False)
        node: Any
        for node, *_ in edges:
            if type(node) is RECV_NODE and node not in reached:
                self.reached[node.recv.message] = set()  # it has nothing to send
        if roots.into == INTO_GRAD:
            self._backward(outputs, grads, [*tensors.values(), *onward], True)
            return ()
        with noting(inner) as noted, self._through.into(self._context.gradients, list(island.leaves), wait):
            self._backward(outputs, grads, [*edges, *onward], True)
        return [noted.get(number) for number in numbers]

    def _capture(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None],
        numbers: Sequence[int],
        inner: dict[int, torch.Tensor],
        onward: Sequence[GradientEdge],
        reached: dict[Any, set[int]],
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of these inputs, as torch captures them: after their hooks, unless other inputs lie behind.

        To the engine, what leads to any output of a recv leads to all of them.
        """
        assert self.roots is not None
        assert self.needs is not None
        edges = [self.roots.inputs[number] for number in numbers]
        for node, leading in reached.items():
            if len(leading) < node.recv.count:
                break
        else:
            return self._backward(outputs, grads, [*edges, *onward], False)
        last = {number: inner[number] for number in inner if not self.needs.leads_on(self.roots.inputs[number])}
        with noting(last) as noted:
            captured = self._backward(outputs, grads, [*edges, *onward], False)
        return [noted.get(number, grad) for number, grad in zip(numbers, captured, strict=False)]

    @interruptible
    def _backward(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | GradientEdge],
        accumulate: bool,
    ) -> Sequence[torch.Tensor | None]:
        about = self._about
        create = about.create_graph
        retain = about.retain_graph or create
        if about.autocast is None and not about.check_nan:
            return run_backward(tuple(outputs), tuple(grads), retain, create, tuple(inputs), True, accumulate)
        run = partial(run_backward, tuple(outputs), tuple(grads), retain, create, tuple(inputs), True, accumulate)
        return self._in_modes(run, outputs)

    def _in_modes(
        self, run: Callable[[], Sequence[torch.Tensor | None]], outputs: Sequence[torch.Tensor | GradientEdge]
    ) -> Sequence[torch.Tensor | None]:
        """Run the engine in the autocast and anomaly modes of the pass. The engine may be interrupted, they may not."""
        about = self._about
        with contextlib.ExitStack() as modes:
            if about.autocast is not None:
                modes.enter_context(enter_autocast(about.autocast))
            if about.check_nan and not anomaly.is_checking():
                modes.enter_context(anomaly.nan_checked([start_of(output) for output in outputs]))
            return _run_engine(run)

    def take(self, island: Island, captured: Sequence[torch.Tensor | None]) -> None:
        """Put what `run` captured to where the pass wants it. Without the lock."""
        if self._about.leaves == INTO_CONTEXT:
            gradients = self._context.gradients
            node: Any
            for index, node in enumerate(island.leaves):
                leaf = node.variable
                if leaf.requires_grad:  # else it was frozen since, and AccumulateGrad does nothing
                    gradients.add(leaf, captured, index)
            return
        with self._lock, torch.enable_grad():
            for number, grad in zip(sorted(island.wanted), captured, strict=False):
                there = self.captured[number]
                self.captured[number] = grad if there is None else there if grad is None else add_up(there, grad)

    def forget(self, island: Island) -> None:
        """Let go of the gradients that an island has used. Without the lock."""
        for entry in island.entries:
            fed = self.fed.get(entry)  # type: ignore[call-overload]  # entries but ROOT are message ids, and it has none
            if fed is not None:
                grads, fed.grads = fed.grads, None
                send = self._context.sends.get(entry)  # type: ignore[call-overload]  # as above
                if send is not None and grads is not None:
                    send.forget(grads)  # not those of a pass that began after this one had failed


def start_of(tensor: torch.Tensor | GradientEdge) -> islands.Start:
    """Where a walk from a tensor begins."""
    if isinstance(tensor, GradientEdge):
        return tensor.node, tensor.output_nr
    node = tensor.grad_fn
    if node is not None:  # gradient_edge would make a node to own this one; the tensor does, for as long as we need
        return node, tensor.output_nr
    return gradient_edge(tensor).node, 0


@interruptible
def _run_engine(run: Callable[[], Sequence[torch.Tensor | None]]) -> Sequence[torch.Tensor | None]:
    return run()


def _raise_from_zero(nodes: Iterable[Node]) -> None:
    """Only gates may have the lowest priority: an ordinary node that has it is raised."""
    for node in nodes:
        if sequence_number(node) == 0 and type(node).__name__ != "_GateBackward":
            set_sequence_number(node, 1)


def _compiled_autograd_off() -> Any:
    """Compiled autograd ignores priorities, so it must not run gated islands."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    # Who has not imported it cannot have enabled it; and importing it takes seconds.
    return contextlib.nullcontext() if compiled is None else compiled._disable()
