"""One backward pass on one worker: drives `telegrad.protocol.backward` with islands, torch's engine and messages.

The rules are in the protocol; here they meet the graph. Effects of the protocol are carried out by whoever caused them:
a runner that read a gradient runs the island that it completes. Only where the pass was begun, islands without gates
wait for the thread inside `backward()`, so that the user's profiler, anomaly mode and autocast see them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad.agent.channel import Channel
from telegrad.agent.oneway import Wakeup
from telegrad.autograd import islands
from telegrad.autograd.contexts import DistAutogradContext, current
from telegrad.autograd.functions import ANCHOR_NODE, ONE, Recv, SendRpcBackward, chain_gates
from telegrad.autograd.islands import Island
from telegrad.autograd.postman import Postman, Ticket
from telegrad.autograd.torch_private import (
    has_post_accumulate_hooks,
    run_backward,
    sequence_number,
    set_sequence_number,
)
from telegrad.errors import TelegradError
from telegrad.protocol.backward import ROOT, Answer, Done, Effect, Pass, Probe, Report, Resume, Start, Stuck
from telegrad.waiting import Event
from telegrad.wire.messages import (
    GRADIENT,
    INTO_CONTEXT,
    INTO_GRAD,
    NONE,
    UNREACHED,
    PassInfo,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)

Answered = Callable[[dict[int, Report], int, int], list[Effect[Ticket]]]
"""Tells the protocol that a message was answered: the reports in the answer, by whom, and how many counted messages."""


class PassAborted(TelegradError):
    """Unwinds an island of a pass that has failed; the failure itself is told elsewhere."""


running: ContextVar[PassRun | None] = ContextVar("telegrad_pass", default=None)
"""The pass whose island the current thread runs."""


@dataclass
class _Fed:
    """What arrived for one send."""

    grads: list[torch.Tensor | None] | None
    reached: list[int]


@dataclass
class Roots:
    """Where the pass begins, and what its caller wants to have."""

    tensors: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    inputs: Sequence[GradientEdge] = ()


class PassRun:
    """One pass, as this worker sees it."""

    def __init__(
        self, postman: Postman, context: DistAutogradContext, about: PassInfo, roots: Roots | None = None
    ) -> None:
        self.context = context
        self.about = about
        self.roots = roots
        self.captured: list[torch.Tensor | None] = [None] * (len(roots.inputs) if roots is not None else 0)
        self.failure: Exception | None = None
        self._postman = postman
        # protects everything below, and failure and captured
        self._lock = threading.Lock()
        self._state: Pass[Ticket] = Pass(postman.me)
        self._numbers = itertools.count()
        self._islands: dict[int, Island] = {}
        self._fed: dict[int, _Fed] = {}
        self._live: dict[int, set[int]] = {}
        self._probe_seen: set[Node] = set()
        self._reached: dict[
            int, set[int]
        ] = {}  # recvs that the engine is to execute -> which outputs; gone when it did
        self._gates: dict[int, Event] = {}
        self._todo: deque[Effect[Ticket]] = deque()
        self._wake: Wakeup | None = None
        self._reader_of: int | None = None  # the worker whose answers the driver reads itself
        self._way_back: Channel | None = None  # where this worker's messages went whose answers the driver reads
        self._ways_back: dict[int, Channel] = {}  # where others read what this worker has to say to them
        self._asking = itertools.count(1)
        self._asked: dict[int, Answered] = {}  # messages that are not answered
        self._over = False
        self._running = 0
        self._driver = 0  # the thread inside backward()

    # -- where the pass begins ----------------------------------------------------------------------------------

    def drive(self, deadline: float | None) -> None:
        """Run the pass, on the thread that called backward, and return when it is over everywhere."""
        self._driver = get_ident()
        try:
            self._drive(deadline)
        except BaseException as error:
            self.fail(error)  # an interrupt, too: the others must not wait for the rest
            if self._way_back is not None and self._state.owed:
                self._way_back.leave_to_poller()
            raise

    def _drive(self, deadline: float | None) -> None:
        with self._lock:
            self._plan()
            effects = self._state.begin()
        self._carry_out(effects)
        while True:
            with self._lock:
                effect = self._todo.popleft() if self._todo else None
                if effect is None:
                    if self._over or self.failure is not None:
                        break
                    wake = self._wake = Wakeup()
            if effect is not None:
                self._do_here(effect)
            elif not self._postman.wait_for_messages(wake, self._way_back, deadline):
                self.fail(self._postman.too_late(self.about, self._state.owed))
        if self.failure is not None:
            raise self.failure

    def _do_here(self, effect: Effect[Ticket]) -> None:
        if isinstance(effect, Start):
            self._run_island(effect)
        elif isinstance(effect, Probe):
            self._begin_probe()
        elif isinstance(effect, Resume):
            self._resume_everybody(effect.workers)

    def _for_the_caller(self, effect: Effect[Ticket]) -> None:
        with self._lock:
            self._todo.append(effect)
            wake = self._wake
        if wake is not None:
            wake.set()

    # -- effects ------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect[Ticket]]) -> None:
        run_here: list[Start] = []
        for effect in effects:
            if isinstance(effect, Answer):
                self._answer(effect.ticket)
            elif isinstance(effect, Start):
                if effect.waiting:
                    self._postman.start_thread("gated island", partial(self._run_island, effect))
                elif self.roots is not None:
                    self._for_the_caller(effect)
                else:
                    run_here.append(effect)
            elif isinstance(effect, Done):
                self._finish()
            elif isinstance(effect, Stuck):
                names = ", ".join(map(repr, map(self._postman.name_of, effect.workers)))
                self.fail(
                    TelegradError(
                        f"the backward pass came to rest, but worker {names} still waits for gradients: this is a bug "
                        "in telegrad, please report it with the program"
                    )
                )
            else:
                self._for_the_caller(effect)
        for start in run_here[1:]:
            self._postman.submit(partial(self._run_island, start))
        for start in run_here[:1]:
            self._run_island(start)

    def _answer(self, ticket: Ticket) -> None:
        with self._lock:
            reports, failure, count = self._state.reports(), self.failure, self._state.count_for(ticket[0])
        self._postman.answer(self.about, ticket, count, reports, failure)

    def _finish(self) -> None:
        with self._lock:
            self._over = True
            wake = self._wake
        if wake is not None:
            wake.set()

    # -- messages of others -------------------------------------------------------------------------------------

    def gradient(
        self, sender: int, request: PropagateGradientsReq, grads: list[torch.Tensor | None], back: Channel | None
    ) -> None:
        """The gradients of one of our sends came. `back` is where the sender reads what it is told, if it does."""
        ticket = (sender, request.call, back) if request.call else None
        with self.context.lock:
            send = self.context.sends.get(request.message)
        try:
            if send is None:
                them, me = self._postman.name_of(sender), self._postman.name_of(self._postman.me)
                raise TelegradError(
                    f"worker {them!r} sent gradients for message {request.message:#x}, which worker {me!r} never "
                    f"sent in context {self.context.id:#x}"
                )
            send.check(grads, sender, self._postman.me, self._postman.name_of)
        except TelegradError as error:
            self.fail(error)
            self.late(ticket, sender)
            return
        reached = [index for index, state in enumerate(request.states) if state != UNREACHED]
        with self._lock:
            if self.failure is not None or request.message in self._fed:
                self._postman.count("late gradient messages")
                effects = self._state.nothing_new(ticket, sender)
            else:
                self._fed[request.message] = _Fed(grads, reached)
                if back is not None:
                    self._ways_back[sender] = back
                effects = []
                if request.known and not self._state.known:
                    effects += self._learn()
                elif not self._state.planned:
                    self._plan()
                if not self._state.has(request.message):
                    self._grow(request.message)
                effects += self._state.gradient(ticket, request.message, sender)
            gate = self._gates.pop(request.message, None)
        if gate is not None:
            gate.set()
        self._carry_out(effects)

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """A message could not be taken. It may have been answered already; whoever gets a second answer drops it."""
        self.fail(error)
        if ticket[1]:
            self._answer(ticket)

    def late(self, ticket: Ticket | None, sender: int) -> None:
        """A message came that changes nothing."""
        with self._lock:
            effects = self._state.nothing_new(ticket, sender)
        self._carry_out(effects)

    def probed(self, ticket: Ticket, request: ProbeReq) -> None:
        """The probe reached tensors of one of our sends."""
        with self._lock:
            effects = self._state.probed(ticket)
        self._carry_out(effects)
        with self.context.lock:
            send = self.context.sends.get(request.message)
        starts: list[islands.Start] = []
        if send is not None:
            with self._lock:
                named = {index for index in request.tensors if 0 <= index < len(send)}
                fresh = named - self._live.setdefault(request.message, set())
                self._live[request.message] |= fresh
            starts = [_start(send.tokens[index]) for index in sorted(fresh)]
        self._probe_on(starts)

    def resumed(self, ticket: Ticket) -> None:
        """Word came that the probe is over."""
        with self._lock:
            effects = [] if self._state.known else self._learn()
            effects += self._state.resumed(ticket)
        self._carry_out(effects)

    # -- plan ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Which entries form islands. Called with the lock held."""
        planned = self._planned_islands()
        self._islands.update(planned)
        self._state.plan({number: island.entries for number, island in planned.items()})

    def _learn(self) -> list[Effect[Ticket]]:
        """The probe is over: plan what waits again, over live tensors only. Called with the lock held."""
        self._state.known = True
        planned = self._planned_islands()
        self._islands.update(planned)
        return self._state.learn({number: island.entries for number, island in planned.items()})

    def _planned_islands(self) -> dict[int, Island]:
        started = self._state.started_entries()
        starts: dict[Any, list[islands.Start]] = {}
        if self.roots is not None and ROOT not in started:
            starts[ROOT] = [_start(root) for root in self.roots.tensors]
        with self.context.lock:
            sends = list(self.context.sends.values())
        for send in sends:
            if send.message not in started:
                begin = [_start(send.tokens[index]) for index in self._tensors_of(send)]
                if begin:
                    starts[send.message] = begin
        wanted: dict[Node, list[int]] = {}
        if self.roots is not None:
            for number, edge in enumerate(self.roots.inputs):
                wanted.setdefault(edge.node, []).append(number)
        made = islands.plan(
            starts,
            # Hooks on AccumulateGrad cannot be seen from here, so where it is executed each leaf counts as having some.
            leaves_are_common=self.about.leaves == INTO_GRAD or self._postman.accumulate_hooks,
            wanted=wanted or None,
        )
        return {next(self._numbers): island for island in made}

    def _tensors_of(self, send: SendRpcBackward) -> Sequence[int]:
        """Which tensors of a send this pass runs: those reached; or alive; or, nothing being known yet, all."""
        fed = self._fed.get(send.message)
        if fed is not None:
            return fed.reached
        if self._state.known:
            return sorted(self._live.get(send.message, ()))
        return range(len(send))

    def _grow(self, message: int) -> None:
        """A send that was recorded after the plan. Called with the lock held."""
        with self.context.lock:
            send = self.context.sends.get(message)
        if send is None:
            raise TelegradError(f"context {self.context.id:#x} was left")
        starts: dict[Any, list[islands.Start]] = {
            message: [_start(send.tokens[index]) for index in self._tensors_of(send)]
        }
        number = next(self._numbers)
        (self._islands[number],) = islands.plan(starts)
        self._state.grow(number, [message])

    # -- the probe ----------------------------------------------------------------------------------------------

    def _begin_probe(self) -> None:
        assert self.roots is not None
        self._postman.count("probes")
        self._probe_on([_start(root) for root in self.roots.tensors])

    def _probe_on(self, starts: list[islands.Start]) -> None:
        """Walk from these, and send the probe on to the workers behind the recvs that are met."""
        with self._lock:
            reached = islands.reach(starts, self._probe_seen)
            for _ in reached:
                self._state.probe_sent()
        for node, indices in reached.items():
            recv: Recv = node.recv

            number = self._ask(self._state.probe_answered)
            self._send(recv.source, ProbeReq(number, self.about, recv.message, tuple(sorted(indices))))
        with self._lock:
            effects = self._state.probe_walked()
        self._carry_out(effects)

    def _resume_everybody(self, workers: Sequence[int]) -> None:
        with self._lock:
            effects = self._learn()
            for _ in workers:
                self._state.sent()
        for worker in workers:
            self._send(worker, ResumeReq(self._ask(self._state.answered), self.about))
        self._carry_out(effects)
        with self._lock:
            effects = self._state.resumed_here()
        self._carry_out(effects)

    # -- islands ------------------------------------------------------------------------------------------------

    def _run_island(self, start: Start) -> None:
        island = self._islands[start.island]
        interrupt: BaseException | None = None
        with self._lock:
            self._running += 1
        here, inside = running.set(self), current.set(self.context)
        try:
            if self.failure is None:
                with self._postman.acting():
                    self._run_engine(island, set(start.waiting))
        except PassAborted:
            self._postman.count("islands aborted")
        except BaseException as error:  # noqa: BLE001 - whatever user code raises ends the pass; its caller is told
            self.fail(error)
            interrupt = None if isinstance(error, Exception) else error
        finally:
            running.reset(here)
            current.reset(inside)
            self._forget_gradients(island)
        with self._lock:
            self._running -= 1
            effects = self._state.ended()
        self._carry_out(effects)
        if interrupt is not None and get_ident() == self._driver:
            raise interrupt  # Ctrl-C in an island that the user's own thread ran

    def _forget_gradients(self, island: Island) -> None:
        for entry in island.entries:
            if entry != ROOT:
                with self._lock:
                    fed = self._fed.get(entry)  # type: ignore[call-overload]  # entries but ROOT are message ids
                    grads = fed.grads if fed is not None else None
                    if fed is not None:
                        fed.grads = None
                send = self.context.sends.get(entry)  # type: ignore[call-overload]  # as above
                if send is not None and grads is not None:
                    send.forget(grads)  # not those of a pass that began after this one had failed

    def _run_engine(self, island: Island, waiting: set[Any]) -> None:
        outputs: list[torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        gates: list[tuple[Callable[[], None], Sequence[torch.Tensor]]] = []
        planned = True  # whether everything runs that the plan walked over
        if ROOT in island.entries:
            assert self.roots is not None
            outputs += self.roots.tensors
            grads += self.roots.grads
        for send in self._sends_of(island):
            indices = self._tensors_of(send)
            tokens = [send.tokens[index] for index in indices]
            if send.message in waiting:
                gates.append((partial(self._wait_for, send), tokens))
            else:
                send.set_grads(self._fed[send.message].grads)
                outputs += tokens
                grads += [ONE] * len(tokens)
                planned = planned and len(tokens) == len(send)
        if not outputs and not gates:
            return
        if gates:
            outputs.append(chain_gates(gates))
            grads.append(ONE)
        reached = island.reached
        if gates or not planned:
            seen: set[Node] = set()
            reached = islands.reach([_start(output) for output in outputs], seen)
            if gates:
                _raise_from_zero([*seen, *reached])
        with self._lock:
            for node, outputs_reached in reached.items():
                self._reached[node.recv.message] = outputs_reached
        if gates:
            with torch.autograd.set_multithreading_enabled(False), _compiled_autograd_off():
                self._engine(island, outputs, grads)
        else:
            self._engine(island, outputs, grads)

    def _engine(self, island: Island, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        about = self.about

        def run(inputs: Sequence[GradientEdge], accumulate: bool) -> Sequence[torch.Tensor | None]:
            return run_backward(
                outputs,
                grads,
                retain_graph=about.retain_graph or about.create_graph,
                create_graph=about.create_graph,
                inputs=inputs,
                accumulate=accumulate,
            )

        anchor = [GradientEdge(ANCHOR_NODE, 0)] if island.reached else []
        if about.leaves == INTO_GRAD:
            run((), True)
        elif about.leaves == INTO_CONTEXT:
            nodes: list[Any] = list(island.leaves)
            edges = [*(GradientEdge(node, 0) for node in nodes), *anchor]
            if self._postman.accumulate_hooks or any(has_post_accumulate_hooks(node.variable) for node in nodes):
                with self._postman.accumulate_through.into(self.context.gradients, nodes):
                    run(edges, True)
                return
            captured = run(edges, False)
            if self.failure is not None:
                return  # nobody will ask for them, and another pass may have begun
            for index, node in enumerate(nodes):
                self.context.gradients.add(node.variable, captured, index)
        else:
            numbers = sorted(island.wanted)
            wanted = [self.roots.inputs[number] for number in numbers] if self.roots is not None else []
            if self.roots is not None and not self._leads_back(island):
                anchor = []  # what lies behind the recvs has no part in the answer, and must not run
            if not wanted and not anchor:
                return
            captured = run([*wanted, *anchor], False)
            with self._lock, torch.enable_grad():
                for number, grad in zip(numbers, captured, strict=False):
                    there = self.captured[number]
                    self.captured[number] = grad if there is None else there if grad is None else there + grad

    def _leads_back(self, island: Island) -> bool:
        """Whether gradients that leave through a recv of this island may come back to a tensor that is wanted.

        They can only if a tensor was sent that depends on a wanted one, before the recv's message came.
        """
        with self.context.lock:
            sends = list(self.context.sends.values())
        wanted = {edge.node for edge in self.roots.inputs} if self.roots is not None else set()
        sent = [send.order for send in sends if islands.meets([_start(token) for token in send.tokens], wanted)]
        return bool(sent) and min(sent) < max((node.recv.order for node in island.reached), default=0)

    def _sends_of(self, island: Island) -> list[SendRpcBackward]:
        """The sends among its entries, in record order."""
        with self.context.lock:
            sends = [self.context.sends[entry] for entry in island.entries if entry != ROOT]  # type: ignore[index]
        return sorted(sends, key=lambda send: send.order)

    def _wait_for(self, send: SendRpcBackward) -> None:
        """In a gate: wait for the gradient of a send that is sure to come."""
        with self._lock:
            event = None
            if send.message not in self._fed and self.failure is None:
                event = self._gates.setdefault(send.message, self._postman.runtime.event())
        if event is not None:
            self._postman.wait(event, None)
        with self._lock:
            if self.failure is not None:
                raise PassAborted("the pass has failed")
            send.set_grads(self._fed[send.message].grads)

    # -- gradients out ------------------------------------------------------------------------------------------

    def propagate(self, recv: Recv, grads: Sequence[torch.Tensor | None]) -> None:
        """The engine executed a recv: its gradients go to the worker that it received from."""
        with self._lock:
            reached = self._reached.pop(recv.message, None)
        if reached is None:
            # Sending it would be a second gradient for one message, or one that the pass does not expect: lost.
            raise TelegradError(
                f"a backward() inside this backward pass reached a tensor that came from worker {recv.source_name!r} "
                f"in context {recv.context_id:#x}. Only the pass itself can send its gradient back: detach the tensor "
                "before the inner backward, or make the inner one part of the loss"
            )
        states = tuple(
            GRADIENT if grad is not None else NONE if index in reached else UNREACHED
            for index, grad in enumerate(grads)
        )
        there = [grad for grad in grads if grad is not None]
        metadata = self._postman.record_gradients(self.context, recv.source, there) if self.about.create_graph else None
        on_driver = get_ident() == self._driver
        with self._lock:
            if self.failure is not None:
                raise PassAborted("the pass has failed")
            number = 0
            if self._state.sent(recv.source):
                number = next(self._asking)
                self._asked[number] = self._state.answered
            known = self._state.known
            # Gates need what comes while the driver is at work and reads nothing. There are some after the probe only.
            back = None if known else self._ways_back.get(recv.source)
            reads = on_driver and not known and back is None and self._reader_of in (None, recv.source)
            if reads:
                self._reader_of = recv.source

        def head(attachments: Any) -> PropagateGradientsReq:
            return PropagateGradientsReq(number, self.about, recv.message, states, known, attachments, metadata, reads)

        try:
            channel = self._postman.send(recv.source, head, there, back)
            if reads:
                self._way_back = channel
        except TelegradError as error:
            self.fail(error)
            raise PassAborted("the pass has failed") from error

    def _ask(self, answered: Answered) -> int:
        """A number for a message that will be answered; `answered` tells the protocol when it is."""
        with self._lock:
            number = next(self._asking)
            self._asked[number] = answered
        return number

    def _send(self, worker: int, head: ProbeReq | ResumeReq) -> None:
        try:
            self._postman.send(worker, lambda _: head)
        except TelegradError as error:
            self.fail(error)

    def answered(self, sender: int, answer: PropagateGradientsResp, data: memoryview) -> None:
        """A message that this worker sent was answered."""
        if answer.failure is not None:
            self.fail(self._postman.read_failure(answer.failure, data), told=True)
        elif answer.refusal:
            name = self._postman.name_of(sender)
            self.fail(TelegradError(f"worker {name!r} refused to take part in the pass: {answer.refusal}"))
        with self._lock:
            answered = self._asked.pop(answer.call, None)
            if answered is None:
                return
            effects = answered(self._postman.unpack_reports(answer.reports), sender, answer.count)
        self._carry_out(effects)

    # -- failure ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, *, worker: int | None = None, told: bool = False) -> None:
        """The pass has failed, here or (`worker`) elsewhere. Everybody in the context is told, once."""
        with self._lock:
            if self.failure is not None or self._over:
                return
            self.failure = error if told and isinstance(error, Exception) else self._postman.as_failure(error, worker)
            gates = list(self._gates.values())
            self._gates.clear()
            effects = self._state.abort()
            wake = self._wake
        for gate in gates:
            gate.set()
        self._carry_out(effects)
        if wake is not None:
            wake.set()
        self._postman.spread(self.context, self.about, self.failure)
        if self.roots is None:
            self.let_go()

    def let_go(self) -> None:
        """Keep of a failure what late messages are answered with, and not the frames and tensors behind it."""
        if self.failure is not None:
            self.failure = copy.copy(self.failure)

    @property
    def engaged(self) -> bool:
        """Whether this worker still has part in it."""
        with self._lock:
            return self._state.engaged and self.failure is None and not self._over

    @property
    def busy(self) -> bool:
        """Whether it may go on: a worker that is idle, but partly fed, has still part in it."""
        with self._lock:
            begun_here = self.roots is not None
            return (
                (begun_here or self._state.engaged or self._state.partly_fed())
                and self.failure is None
                and not self._over
            )

    def counts(self) -> tuple[int, int]:
        """Islands that run, and gates that wait in them."""
        with self._lock:
            return self._running, len(self._gates)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<pass {self.about.number:#x}: {len(self._islands)} islands, {len(self._fed)} sends fed, "
                f"{len(self._gates)} gates waiting, {self._state.owed} messages unanswered>"
            )


def _start(tensor: torch.Tensor) -> islands.Start:
    node = tensor.grad_fn
    if node is not None:  # get_gradient_edge would make a node to own this one; the tensor does, for as long as we need
        return node, tensor.output_nr
    return get_gradient_edge(tensor).node, 0


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
