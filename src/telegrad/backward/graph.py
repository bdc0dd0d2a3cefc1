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
from telegrad.backward.islands import Island
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


class PassGraph:
    """This worker's graph, as one pass sees it. The lock of the pass protects it, and callers hold it."""

    __slots__ = (
        "_context",
        "_hooks",
        "_info",
        "_numbers",
        "_seen",
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
        self, context: DistAutogradContext, info: PassInfo, roots: Roots | None, accumulate_hooks: bool
    ) -> None:
        self._context = context
        self._info = info
        self._hooks = accumulate_hooks
        self._numbers = itertools.count()
        self._seen: set[Node] = set()
        self.roots = roots
        self.needs: Needs | None = None
        """In a pass with inputs: what it needs of this worker's graph, complete when the pass begins."""
        if info.leaves == NOWHERE:
            self.needs = Needs(context, roots.inputs if roots is not None else ())
        self.captured: list[torch.Tensor | None] = [None] * (len(roots.inputs) if roots is not None else 0)
        """Gradients of the inputs."""
        self.islands: dict[int, Island] = {}
        self.fed: dict[int, Fed] = {}
        self.live: dict[int, set[int]] = {}
        """The sent tensors that the probe has reached."""
        self.known = False
        """Whether the probe is over."""
        self.reached: dict[int, set[int]] = {}
        """Recvs that the engine will execute, and which of their outputs; removed when it does. Changed by single
        operations, without the lock."""

    def release(self) -> None:
        """Let go of the caller's graph. Called without the lock, when the pass is over."""
        self.roots = None
        for island in list(self.islands.values()):
            island.begin = ()

    # -- plan ---------------------------------------------------------------------------------------------------

    def plan(self, started: set[Entry]) -> dict[int, list[Entry]]:
        """Plan all entries but those that have started. Returns the entries of every new island."""
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
        return range(len(send.tokens))

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

    def _walk(self, starts: Iterable[islands.Start]) -> Found:
        return Found({node.recv: indices for node, indices in islands.reach(starts, self._seen).items()})


def start_of(tensor: torch.Tensor | GradientEdge) -> islands.Start:
    """Return where a walk from a tensor begins."""
    if isinstance(tensor, GradientEdge):
        return tensor.node, tensor.output_nr
    node = tensor.grad_fn
    if node is not None:  # gradient_edge would make a node to own this one; the tensor does, for as long as we need
        return node, tensor.output_nr
    return gradient_edge(tensor).node, 0
