"""One backward pass on one worker: drives `telegrad.protocol.backward` with islands, torch's engine and messages.

The rules are in the protocol; here they meet the graph. Effects of the protocol are carried out by whoever caused them:
a runner that read a gradient runs the island that it completes. Only where the pass was begun, islands without gates
wait for the thread inside `backward()`, so that the user's profiler, anomaly mode and autocast see them.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from threading import get_ident

import msgspec
import torch

from telegrad.backward.contexts import DistAutogradContext, current
from telegrad.backward.graph import Fed, PassGraph, Roots
from telegrad.backward.inputs import Found
from telegrad.backward.islands import Island
from telegrad.backward.messaging import PassMessaging, Ticket
from telegrad.backward.nodes import Recv, SendRpcBackward
from telegrad.backward.reentrant import InnerLeaves
from telegrad.calls.call import current_agent, current_served
from telegrad.calls.oneway import Wakeup
from telegrad.connection.channel import Channel
from telegrad.errors import ResourceExhausted, TelegradError
from telegrad.interrupts import shielded
from telegrad.protocol.backward import Answer, Begin, Done, Effect, Pass, Probe, Report, Resume, Start, Stuck
from telegrad.waiting import Event
from telegrad.wire.messages import (
    GRADIENT,
    NONE,
    UNREACHED,
    LeadsToInputReq,
    PassInfo,
    PiggybackedResp,
    ProbeReq,
    PropagateGradientsReq,
    PropagateGradientsResp,
    ResumeReq,
)

Answered = Callable[[dict[int, Report], int, int], list[Effect[Ticket]]]
"""Tells the protocol that a message was answered: the reports in the answer, by whom, and how many counted messages."""


class PassAborted(TelegradError):
    """Unwinds an island of a pass that has failed; the failure itself is told elsewhere."""


class _Letter(msgspec.Struct):
    """Gradients that leave, and to whom."""

    to: int
    head: Callable[..., PropagateGradientsReq]
    """Makes the head, of descriptors of the gradients."""
    grads: Sequence[torch.Tensor]
    back: Channel | None
    """Where the receiver reads them, if it said so."""
    reads: bool
    """Whether the driver reads there what comes back."""


running: ContextVar[PassRun | None] = ContextVar("telegrad_pass", default=None)
"""The pass whose island the current thread runs."""


class PassRun:
    """One pass, as this worker sees it."""

    def __init__(
        self, postman: PassMessaging, context: DistAutogradContext, about: PassInfo, roots: Roots | None = None
    ) -> None:
        self.context = context
        self.about = about
        self.failure: Exception | None = None
        self._begun_here = roots is not None
        self.messaging = self._messaging = postman
        # protects everything below, and failure
        self._lock = lock = threading.Lock()
        self._state: Pass[Ticket] = Pass(postman.me)
        self._graph = PassGraph(context, about, roots, lock, postman.accumulate_through, postman.accumulate_hooks)
        self._gates: dict[int, Event] = {}
        self._todo: deque[Effect[Ticket]] = deque()
        self._wake: Wakeup | None = None
        self._reader_of: int | None = None  # the worker whose answers the driver reads itself
        self._way_back: Channel | None = None  # where it reads them
        self._ways_back: dict[int, Channel] = {}  # where others read what this worker has to say to them
        self._asking = itertools.count(1)
        self._asked: dict[int, Answered] = {}  # messages that are not answered
        self._over = False
        self._driver = 0  # the thread inside backward()
        self._deadline: float | None = None  # of the driver
        self._slot_waits: dict[int, Event] = {}  # threads that wait for .grad of a leaf, by thread
        # Gradients that wait for the end of their island, by message. Without the lock, by single operations.
        self._last: dict[int, _Letter | None] = {}
        # Leaves of backward passes inside this one, by the thread of the island. Without the lock, as above.
        self.inner: dict[int, InnerLeaves] = {}

    # -- where the pass begins ----------------------------------------------------------------------------------

    def drive(self, deadline: float | None) -> list[torch.Tensor | None]:
        """Run the pass, on the thread that called backward. Returns, when it is over everywhere, what was wanted."""
        self._driver, self._deadline = get_ident(), deadline
        try:
            self._drive(deadline)
            return self._graph.captured
        except BaseException as error:
            self.fail(error)  # an interrupt, too: the others must not wait for the rest
            if self._way_back is not None and self._state.owed:
                self._way_back.leave_to_poller()
            raise
        finally:
            self._graph.let_go()

    def _drive(self, deadline: float | None) -> None:
        if self._graph.needs is None:
            self._begin()
        else:
            with self._lock:
                self._state.survey()
            self._begin_probe("surveys")
        wake = Wakeup()
        while True:
            with self._lock:
                effect = self._todo.popleft() if self._todo else None
                if effect is None:
                    if self._over or self.failure is not None:
                        break
                    wake.raised = False  # who raises it late, for something that is done, wakes us for nothing
                    self._wake = wake
            if type(effect) is Start:
                self._run_island(effect)
            elif effect is not None:
                self._do_here(effect)
            elif not self._messaging.agent.oneway.wait(wake, self._way_back, deadline):
                self.fail(self._messaging.too_late(self.about, self._state.owed))
        if self.failure is not None:
            raise self.failure

    def _begin(self) -> None:
        with self._lock:
            self._state.plan(self._graph.plan(set()))
            effects = self._state.begin()
            if effects and type(effects[0]) is Start:
                self._todo.extend(effects)
                effects = []
        if effects:
            self._carry_out(effects)

    def _do_here(self, effect: Effect[Ticket]) -> None:
        if isinstance(effect, Probe):
            self._begin_probe("probes")
        elif isinstance(effect, Begin):
            self._begin()
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
        run_here: Start | None = None
        for effect in effects:
            if isinstance(effect, Start):
                if effect.waiting:
                    try:
                        self._messaging.start_thread("gated island", partial(self._run_island, effect))
                    except ResourceExhausted as error:
                        self.fail(error)
                        self._run_island(effect)  # which runs nothing now, and notes its end
                elif self._begun_here:
                    # Also on the caller's own thread: it may have read messages of other passes with this one's.
                    self._for_the_caller(effect)
                elif run_here is None:
                    run_here = effect
                else:
                    self._messaging.submit(partial(self._run_island, effect))
            elif isinstance(effect, Answer):
                self._answer(effect.ticket)
            elif isinstance(effect, Done):
                self._finish()
            elif isinstance(effect, Stuck):
                names = ", ".join(map(repr, map(self._messaging.name_of, effect.workers)))
                self.fail(
                    TelegradError(
                        f"the backward pass came to rest, but worker {names} still waits for gradients: this is a bug "
                        "in telegrad, please report it with the program"
                    )
                )
            else:
                self._for_the_caller(effect)
        if run_here is not None:
            self._run_island(run_here)

    def _answer(self, ticket: Ticket) -> None:
        with self._lock:
            reports, failure, count = self._state.reports(), self.failure, self._state.count_for(ticket[0])
        self._messaging.answer(self.about, ticket, count, reports, failure)

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
                them, me = self._messaging.name_of(sender), self._messaging.name_of(self._messaging.me)
                raise TelegradError(
                    f"worker {them!r} sent gradients for message {request.message:#x}, which worker {me!r} never "
                    f"sent in context {self.context.id:#x}"
                )
            send.check(grads, sender, self._messaging.me, self._messaging.name_of)
        except TelegradError as error:
            self.fail(error)
            self.late(ticket, sender)
            return
        message, states = request.message, request.states
        reached: Sequence[int] = range(len(states))
        if UNREACHED in states:
            reached = [index for index in reached if states[index] != UNREACHED]
        with self._lock:
            state, graph = self._state, self._graph
            if graph.needs is not None:
                needed = graph.needs.tensors.get(message, ())
                reached = [index for index in reached if index in needed]
            if self.failure is not None or message in graph.fed:
                self._messaging.count("late gradient messages")
                effects = state.nothing_new(ticket, sender)
            else:
                graph.fed[message] = Fed(grads, reached)
                if back is not None:
                    self._ways_back[sender] = back
                effects = []
                if request.probe_done and not state.known:
                    effects = self._learn()
                elif not state.planned:
                    state.plan(graph.plan(set()))
                if not state.has(message):
                    state.grow(graph.grow(message), [message])
                effects += state.gradient(ticket, message, sender)
                if request.response is not None:
                    effects += self._settle(sender, request.response)
            gate = self._gates.pop(message, None) if self._gates else None
        if gate is not None:
            gate.set()
        if effects:
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
        self._probe_on(lambda: self._graph.meet(send, request.tensors) if send is not None else Found())

    def told(self, ticket: Ticket, request: LeadsToInputReq) -> None:
        """The sender of a message that came says that tensors of it lead to an input of the pass."""
        with self._lock:
            effects = self._state.probed(ticket)
        self._carry_out(effects)
        needs = self._graph.needs
        self._probe_on(lambda: needs.told(request.message, request.tensors) if needs is not None else Found())

    def resumed(self, ticket: Ticket) -> None:
        """Word came that the probe is over."""
        with self._lock:
            effects = [] if self._state.known else self._learn()
            effects += self._state.resumed(ticket)
        self._carry_out(effects)

    def _learn(self) -> list[Effect[Ticket]]:
        """The probe is over: plan what waits again, over live tensors only. Called with the lock held."""
        self._graph.known = True
        return self._state.learn(self._graph.plan(self._state.started_entries()))

    # -- the probe ----------------------------------------------------------------------------------------------

    def _begin_probe(self, counted_as: str) -> None:
        self._messaging.count(counted_as)
        self._probe_on(self._graph.probe)

    def _probe_on(self, walk: Callable[[], Found]) -> None:
        """Walk, and tell other workers what that found: where the probe goes on, and what leads to inputs."""
        with self._lock:
            found = walk()
            for _ in range(len(found.ask) + len(found.tell)):
                self._state.probe_sent()
        for recv, indices in found.ask.items():
            number = self._ask(self._state.probe_answered)
            self._send(recv.source, ProbeReq(number, self.about, recv.message, tuple(sorted(indices))))
        for send, indices in found.tell.items():
            number = self._ask(self._state.probe_answered)
            self._send(send.target, LeadsToInputReq(number, self.about, send.message, tuple(sorted(indices))))
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
        graph = self._graph
        island = graph.islands[start.island]
        interrupt: BaseException | None = None
        try:
            handed_over = island.direct and self.failure is None and graph.hand_over(island)
        except Exception as error:  # noqa: BLE001 - as below
            self.fail(error)
            handed_over = True
        if handed_over:
            self._island_ended(island)
            return
        if island.last and not start.waiting and not self.about.create_graph:
            self._last[island.last] = None
        here, inside = running.set(self), current.set(self.context)
        # User code that runs in here, a hook say, makes its calls from this worker.
        agent, served = current_agent.set(self._messaging.agent), current_served.set(None)
        try:
            if self.failure is None:
                captured = graph.run(island, start.waiting, self._wait_for, self.wait_for_slot)
                if captured and self.failure is None:  # else nobody will ask for them, and another pass may have begun
                    graph.take(island, captured)
                del captured
        except PassAborted:
            self._messaging.count("islands aborted")
        except BaseException as error:  # noqa: BLE001 - whatever user code raises ends the pass; its caller is told
            self.fail(error)
            interrupt = None if isinstance(error, Exception) else error
        finally:
            try:
                if self.inner:
                    self._end_inner()
            except Exception as error:  # noqa: BLE001 - as above
                self.fail(error)
            finally:
                running.reset(here)
                current.reset(inside)
                current_agent.reset(agent)
                current_served.reset(served)
        self._island_ended(island)
        if interrupt is not None and get_ident() in (self._driver, threading.main_thread().ident):
            raise interrupt  # Ctrl-C in an island that the user's own thread ran, be it of somebody else's pass

    def _end_inner(self) -> None:
        inner = self.inner.pop(get_ident(), None)
        if inner is not None:
            inner.end()

    def _island_ended(self, island: Island) -> None:
        self._graph.forget(island)
        letter = self._last.pop(island.last, None) if island.last else None
        word: PiggybackedResp | None = None
        with self._lock:
            effects = self._state.ended()
            if letter is not None and len(effects) == 1 and self.failure is None:
                word = self._last_word(letter, effects[0])
        if letter is not None and self._post(letter, word) and word is not None:
            return
        if effects:
            self._carry_out(effects)

    def _last_word(self, letter: _Letter, effect: Effect[Ticket]) -> PiggybackedResp | None:
        """The answer that can ride on a gradient, if it goes to the same worker. Called with the lock held."""
        if not isinstance(effect, Answer) or effect.ticket[0] != letter.to:
            return None
        reports = self._messaging.pack_reports(self._state.reports())
        return PiggybackedResp(effect.ticket[1], self._state.count_for(letter.to), reports)

    def _wait_for(self, send: SendRpcBackward) -> None:
        """In a gate: wait for the gradient of a send that is sure to come."""
        with self._lock:
            event = None
            if send.message not in self._graph.fed and self.failure is None:
                event = self._gates.setdefault(send.message, self._messaging.runtime.event())
        if event is not None:
            self._messaging.wait(event, None)
        with self._lock:
            if self.failure is not None:
                raise PassAborted("the pass has failed")
            send.set_grads(self._graph.fed[send.message].grads)

    def wait_for_slot(self, event: Event) -> None:
        """In an island: wait until a leaf's ``.grad`` may be used."""
        thread = get_ident()
        with self._lock:
            if self.failure is None:
                self._slot_waits[thread] = event
        try:
            if self.failure is None and not self._messaging.wait(event, self._deadline):
                self.fail(self._messaging.too_late(self.about, self._state.owed))
        finally:
            self._slot_waits.pop(thread, None)
        if self.failure is not None:
            raise PassAborted("the pass has failed")

    # -- gradients out ------------------------------------------------------------------------------------------

    def propagate(self, recv: Recv, grads: Sequence[torch.Tensor | None]) -> None:
        """The engine executed a recv: its gradients go to the worker that it received from."""
        reached = self._graph.reached.pop(recv.message, None)
        if reached is None:
            # Sending it would be a second gradient for one message, or one that the pass does not expect: lost.
            raise TelegradError(
                f"a backward() inside this backward pass reached a tensor that came from worker {recv.source_name!r} "
                f"in context {recv.context_id:#x}. Only the pass itself can send its gradient back: detach the tensor "
                "before the inner backward, or make the inner one part of the loss"
            )
        if not reached:
            return  # it is an input, and nothing behind it is needed
        there: list[torch.Tensor] = []
        for grad in grads:
            if grad is not None:
                there.append(grad)  # a comprehension would be one call more
        states = (GRADIENT,) * len(grads)
        if len(there) < len(grads):
            states = tuple(
                [
                    GRADIENT if grad is not None else NONE if index in reached else UNREACHED
                    for index, grad in enumerate(grads)
                ]
            )
        metadata = (
            self._messaging.record_gradients(self.context, recv.source, there) if self.about.create_graph else None
        )
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
        head = partial(
            PropagateGradientsReq, number, self.about, recv.message, states, known, autograd=metadata, reply_here=reads
        )
        letter = _Letter(recv.source, head, there, back, reads)
        if not number and recv.message in self._last:
            self._last[recv.message] = letter  # `_island_ended` sends it
        elif not self._post(letter):
            raise PassAborted("the pass has failed")

    def release_held(self) -> None:
        """Send what waits for the end of its island: the engine is about to call something of the user's."""
        for message, letter in list(self._last.items()):
            if letter is not None and self._last.pop(message, None) is not None and not self._post(letter):
                raise PassAborted("the pass has failed")

    def _post(self, letter: _Letter, word: PiggybackedResp | None = None) -> bool:
        """Send gradients, and with them an answer; False: that failed, and so has the pass."""
        head = letter.head if word is None else partial(letter.head, response=word)
        try:
            channel = self._messaging.agent.oneway.send(letter.to, head, letter.grads, back=letter.back)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller of backward is told
            self.fail(error)
            return False
        if letter.reads:
            self._way_back = channel
        return True

    def _ask(self, answered: Answered) -> int:
        """A number for a message that will be answered; `answered` tells the protocol when it is."""
        with self._lock:
            number = next(self._asking)
            self._asked[number] = answered
        return number

    def _send(self, worker: int, head: ProbeReq | LeadsToInputReq | ResumeReq) -> None:
        try:
            self._messaging.agent.oneway.send(worker, lambda _: head)
        except TelegradError as error:
            self.fail(error)

    def answered(self, sender: int, answer: PropagateGradientsResp, data: memoryview) -> None:
        """A message that this worker sent was answered."""
        if answer.failure is not None:
            self.fail(self._messaging.read_failure(answer.failure, data), told=True)
        elif answer.refusal:
            name = self._messaging.name_of(sender)
            self.fail(TelegradError(f"worker {name!r} refused to take part in the pass: {answer.refusal}"))
        with self._lock:
            effects = self._settle(sender, answer)
        self._carry_out(effects)

    def _settle(self, sender: int, answer: PropagateGradientsResp | PiggybackedResp) -> list[Effect[Ticket]]:
        """Tell the protocol of an answer. Called with the lock held."""
        answered = self._asked.pop(answer.call, None)
        if answered is None:
            return []
        return answered(self._messaging.unpack_reports(answer.reports), sender, answer.count)

    # -- failure ------------------------------------------------------------------------------------------------

    @shielded
    def fail(self, error: BaseException, *, worker: int | None = None, told: bool = False) -> None:
        """The pass has failed, here or (`worker`) elsewhere. Everybody in the context is told, once."""
        with self._lock:
            if self.failure is not None or self._over:
                return
            self.failure = error if told and isinstance(error, Exception) else self._messaging.as_failure(error, worker)
            gates = [*self._gates.values(), *self._slot_waits.values()]
            self._gates.clear()
            effects = self._state.abort()
            wake = self._wake
        for gate in gates:
            gate.set()
        self._carry_out(effects)
        if wake is not None:
            wake.set()
        self._messaging.spread(self.context, self.about, self.failure)
        if not self._begun_here:
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
            return (
                (self._begun_here or self._state.engaged or self._state.partly_fed())
                and self.failure is None
                and not self._over
            )

    def counts(self) -> tuple[int, int]:
        """Islands that run, and gates that wait in them."""
        with self._lock:
            return self._state.running, len(self._gates)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<pass {self.about.number:#x}: {len(self._graph.islands)} islands, {len(self._graph.fed)} sends fed, "
                f"{len(self._gates)} gates waiting, {self._state.owed} messages unanswered>"
            )
