"""What one pass knows of this worker's graph: the plan of its islands, gradients that have arrived, and the probe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from telegrad.backward import islands
from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.inputs import Found, Needs
from telegrad.backward.islands import Island, Start
from telegrad.backward.nodes import SendRpcBackward
from telegrad.errors import TelegradError
from telegrad.protocol.backward import ROOT, Entry
from telegrad.torch_private import gradient_edge
from telegrad.wire.messages import INTO_GRAD, NOWHERE, PassInfo


class Roots(msgspec.Struct, eq=False):
    """The tensors that a pass begins with, and what its caller wants to have."""

    tensors: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    inputs: Sequence[GradientEdge] = ()
    input_tensors: Sequence[torch.Tensor] = ()
    """The inputs themselves."""
    into: int = NOWHERE
    """Where gradients of the inputs go."""


class Fed(msgspec.Struct, eq=False):
    """The gradients that arrived for one send."""

    grads: list[torch.Tensor | None] | None
    """None when they have been used."""
    reached: Sequence[int]
    _send: SendRpcBackward | None = None
    """The send whose tokens return them, if they do."""

    def give_to(self, send: SendRpcBackward) -> None:
        """Have the tokens of the send return the gradients."""
        self._send = send
        send.set_grads(self.grads)

    def forget(self) -> None:
        """Let go of the gradients, which have been used."""
        grads, self.grads = self.grads, None
        if self._send is not None and grads is not None:
            self._send.forget(grads)  # not those of a pass that began after this one had failed


class PassGraph(msgspec.Struct, eq=False):
    """This worker's graph, as one pass sees it. The lock of the pass protects it, and callers hold it."""

    _context: DistAutogradContext
    _info: PassInfo
    roots: Roots | None
    _hooks: bool
    _numbers: itertools.count[int] = msgspec.field(default_factory=itertools.count)
    _seen: set[Node] = msgspec.field(default_factory=set)
    needs: Needs | None = None
    """In a pass with inputs: what it needs of this worker's graph, complete when the pass begins."""
    captured: list[torch.Tensor | None] = msgspec.field(default_factory=list)
    """Gradients of the inputs."""
    islands: dict[int, Island] = msgspec.field(default_factory=dict)
    fed: dict[int, Fed] = msgspec.field(default_factory=dict)
    live: dict[int, set[int]] = msgspec.field(default_factory=dict)
    """The sent tensors that the probe has reached."""
    known: bool = False
    """Whether the probe is over."""
    reached: dict[int, set[int]] = msgspec.field(default_factory=dict)
    """Recvs that the engine will execute, and which of their outputs; removed when it does. Changed by single
    operations, without the lock."""

    def want_inputs(self) -> None:
        """Prepare for a pass with inputs."""
        inputs = self.roots.inputs if self.roots is not None else ()
        self.needs = Needs(self._context, inputs)
        self.captured = [None] * len(inputs)

    def release(self) -> None:
        """Let go of the caller's graph. Called without the lock, when the pass is over."""
        self.roots = None
        for island in list(self.islands.values()):
            island.begin = ()

    # -- plan ---------------------------------------------------------------------------------------------------

    def plan(self, started: set[Entry]) -> dict[int, list[Entry]]:
        """Plan all entries but those that have started. Returns the entries of every new island."""
        roots = self.roots
        starts: dict[Any, Sequence[Start]] = {}
        wanted: dict[Node, list[int]] | None = None
        if roots is not None:
            if ROOT not in started:
                starts[ROOT] = begin = []
                for tensor in roots.tensors:
                    node = tensor.grad_fn
                    begin.append(start_of(tensor) if node is None else (node, tensor.output_nr))
            if roots.inputs:
                wanted = {}
                for number, edge in enumerate(roots.inputs):
                    wanted.setdefault(edge.node, []).append(number)
        with self._context.lock:
            sends = list(self._context.sends.values())
        fed, unknown = self.fed, self.needs is None and not self.known
        for send in sends:
            message = send.message
            if message not in started:
                arrived = fed.get(message)
                if arrived is not None:  # as `tensors_of` says, for the sends of nearly all passes
                    begin = send.edges(arrived.reached)
                else:
                    begin = send.edges(range(send.count) if unknown else self.tensors_of(send))
                if begin:
                    starts[message] = begin
        # Hooks on AccumulateGrad cannot be seen from here, so every leaf whose node is executed is taken to have some.
        common = self._info.leaves == INTO_GRAD or self._hooks or (roots is not None and roots.into != NOWHERE)
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
        """Add an island for a send that was recorded after the plan. Returns its number."""
        with self._context.lock:
            send = self._context.sends.get(message)
        if send is None:
            raise TelegradError(f"context {self._context.id:#x} was left")
        number = next(self._numbers)
        begin = send.edges(self.tensors_of(send))
        (self.islands[number],) = islands.plan({message: begin})
        return number

    def tensors_of(self, send: SendRpcBackward) -> Sequence[int]:
        """Return which tensors of a send this pass runs: those reached, or live, or all if nothing is known yet."""
        fed = self.fed.get(send.message)
        if fed is not None:
            return fed.reached
        if self.needs is not None:
            return sorted(self.needs.tensors.get(send.message, ()))
        if self.known:
            return sorted(self.live.get(send.message, ()))
        return range(send.count)

    # -- the probe ----------------------------------------------------------------------------------------------

    def probe(self) -> Found:
        """Walk from the roots."""
        starts = [start_of(root) for root in self.roots.tensors] if self.roots is not None else []
        return self._walk(starts) if self.needs is None else self.needs.from_roots(starts)

    def mark_live(self, send: SendRpcBackward, tensors: Iterable[int]) -> Found:
        """Note that the probe has reached these tensors of a send, and walk on from them."""
        named = {index for index in tensors if 0 <= index < len(send)}
        live = self.live.setdefault(send.message, set())
        fresh = sorted(named - live)
        live |= named
        return self._walk(send.edges(fresh)) if self.needs is None else self.needs.from_sent(send, fresh)

    def _walk(self, starts: Iterable[Start]) -> Found:
        return Found({node.recv: indices for node, indices in islands.reach(starts, self._seen).items()})


def start_of(tensor: torch.Tensor | GradientEdge) -> Start:
    """Return where a walk from a tensor begins."""
    if isinstance(tensor, GradientEdge):
        return tensor.node, tensor.output_nr
    node = tensor.grad_fn
    if node is not None:  # gradient_edge would make a node to own this one; the tensor does, for as long as we need
        return node, tensor.output_nr
    return gradient_edge(tensor).node, 0
