"""The rules of one backward pass on one worker: which islands may start, and when the pass is over.

Gradients *enter* a worker's graph at its roots and at its sends. Entries that reach a common node form an *island*,
which torch's engine runs once.

The rules:

1. An island starts when gradients for all its entries have arrived.
2. When the whole group is quiet (see `termination`) and no island on any worker is partly fed, the pass is over.
3. When the group is quiet and some island is partly fed, either an entry's tensor was not used, or the island must run
   to produce the very gradient that it waits for. Now the *probe* walks from the roots over all workers and marks the
   sent tensors that this pass will reach. Entries that were not reached are dead, and are dropped.
4. After the probe, the islands that wait are planned again. They start as soon as one entry has arrived; live entries
   that have not arrived get a *gate*, a node that waits inside the running island.
5. There is at most one probe. If islands are partly fed when the group is quiet again, a rule above was broken, and the
   pass fails instead of waiting.
6. A pass with inputs begins with the probe, which then also finds the paths to the inputs (see `input_paths`). If the
   group is quiet with an island partly fed, liveness is known already, and the pass continues as after the probe.
7. When the pass is over or has failed here, or the probe is over, late or duplicate messages are acknowledged at once
   and change nothing.

With each acknowledgement that it delays (rule 1 of `termination`), a worker reports whether islands are partly fed
there. Reports travel up to the worker that started the pass. Each has a number, so an old one never replaces a newer
one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from telegrad.protocol.termination import Termination

Entry = Hashable
"""`ROOT`, or the message id of a send."""
ROOT = "root"
Ticket = TypeVar("Ticket")


class IdleReport(msgspec.Struct, frozen=True):
    """What a worker reports about itself when it becomes idle."""

    number: int
    partly_fed: bool


class Acknowledge(msgspec.Struct, Generic[Ticket], frozen=True):
    """Acknowledge this message now, with `reports`."""

    ticket: Ticket


class StartIsland(msgspec.Struct, frozen=True):
    """Run this island. `waiting` are its entries that have not arrived: they get gates."""

    island: int
    waiting: tuple[Entry, ...] = ()


class StartProbe(msgspec.Struct, frozen=True):
    """Start the probe: walk from the roots."""


class BeginPass(msgspec.Struct, frozen=True):
    """The paths to the inputs are known: plan, and call `begin`."""


class ResumePass(msgspec.Struct, frozen=True):
    """The probe is over: tell these workers, and plan again."""

    workers: tuple[int, ...]


class PassDone(msgspec.Struct, frozen=True):
    """The pass is over on every worker."""


class PassStuck(msgspec.Struct, frozen=True):
    """Rule 5: islands of these workers are partly fed, and no more gradients will arrive."""

    workers: tuple[int, ...]


START_PROBE: Final = StartProbe()
BEGIN_PASS: Final = BeginPass()
PASS_DONE: Final = PassDone()

PassEffect = Acknowledge[Ticket] | StartIsland | StartProbe | BeginPass | ResumePass | PassDone | PassStuck


class _Island(msgspec.Struct, eq=False):
    entries: frozenset[Entry]
    arrived: set[Entry] = msgspec.field(default_factory=set)
    started: bool = False


class BackwardPass(msgspec.Struct, Generic[Ticket], eq=False):
    """The state of one pass at worker `me`. Call `plan` before the first gradient arrives; `begin` starts the pass."""

    me: int
    liveness_known: bool = False
    """The probe is over, so it is known which entries are alive."""
    planned: bool = False
    _islands: dict[int, _Island] = msgspec.field(default_factory=dict)
    island_of: dict[Entry, int] = msgspec.field(default_factory=dict)
    """The island of each entry."""
    _partly_fed: int = 0  # islands with some of their gradients: counted, because reports are made often
    flow: Termination[Ticket] = msgspec.field(default_factory=Termination)
    """The flow of gradients. Its `sent` and `count_for` are called directly."""
    _probe_flow: Termination[Ticket] | None = None  # created on demand: most passes have no probe
    _reports: dict[int, IdleReport] = msgspec.field(default_factory=dict)
    _number: int = 0
    _probing_first: bool = False
    _probe_over: bool = False
    _ended: bool = False

    # -- islands ------------------------------------------------------------------------------------------------

    def plan(self, islands: Mapping[int, Collection[Entry]]) -> None:
        """Set which entries form which islands. Islands that have started do not change."""
        self.planned = True
        before = self._islands
        if before:
            self._islands = {number: island for number, island in before.items() if island.started}
            self.island_of = {entry: number for number, island in self._islands.items() for entry in island.entries}
        for number, entries in islands.items():
            self._islands[number] = _Island(frozenset(entries))
            for entry in entries:
                self.island_of[entry] = number
        if before is not self._islands:
            for island in before.values():
                for entry in island.arrived:
                    now = self.island_of.get(entry)
                    if now is not None:
                        self._islands[now].arrived.add(entry)
            self._partly_fed = sum([bool(island.arrived) and not island.started for island in self._islands.values()])

    def add_island(self, number: int, entries: Iterable[Entry]) -> None:
        """Add an island of entries that did not exist when the others were planned."""
        self._islands[number] = island = _Island(frozenset(entries))
        for entry in island.entries:
            self.island_of[entry] = number

    def started_entries(self) -> set[Entry]:
        """Return the entries of islands that have started."""
        return {entry for island in self._islands.values() if island.started for entry in island.entries}

    def partly_fed(self) -> bool:
        """Return whether an island here has some of its gradients and waits for the rest."""
        return self._partly_fed > 0

    def _start(self, number: int) -> list[PassEffect[Ticket]]:
        island = self._islands[number]
        if self._ended or island.started or not island.arrived:
            return []
        complete = len(island.arrived) == len(island.entries)
        if not complete and not self.liveness_known:
            return []
        island.started = True
        self._partly_fed -= 1
        self.flow.active += 1
        return [StartIsland(number, () if complete else tuple(sorted(island.entries - island.arrived, key=str)))]

    # -- the flow of gradients ----------------------------------------------------------------------------------

    def begin(self) -> list[PassEffect[Ticket]]:
        """Start the pass here: the gradients of the roots have arrived."""
        self._probing_first = False
        self.flow.engaged = self.flow.started_here = True  # as `start` and `idle` do, around what follows
        return self._arrive(ROOT) or self._settled([])  # while an island runs here, nothing can be over

    def gradient(self, ticket: Ticket | None, entry: Entry, sender: int | None = None) -> list[PassEffect[Ticket]]:
        """Record the gradient of one of our sends. Without a ticket it is counted, and not acknowledged."""
        flow = self.flow
        tickets = flow.received(ticket, sender)
        effects = self._arrive(entry)
        if not effects:  # otherwise this worker is active, and nothing can be over
            tickets += flow.settle()
        return effects + self._settled(tickets) if tickets or not effects else effects

    def _arrive(self, entry: Entry) -> list[PassEffect[Ticket]]:
        number = self.island_of.get(entry)
        if number is None:
            return []
        island = self._islands[number]
        if len(island.entries) == 1 and not (island.started or self._ended):
            # The short way to what follows: an island with one entry is never partly fed.
            island.started = True
            island.arrived.add(entry)
            self.flow.active += 1
            return [StartIsland(number)]
        if not island.arrived and not island.started:
            self._partly_fed += 1
        island.arrived.add(entry)
        return self._start(number)

    def late_message(self, ticket: Ticket | None, sender: int | None = None) -> list[PassEffect[Ticket]]:
        """Record a message that changes nothing here (late, or a duplicate)."""
        return self._settled(self.flow.received(ticket, sender) + self.flow.settle())

    def acknowledged(
        self, reports: Mapping[int, IdleReport], sender: int | None = None, count: int = 0
    ) -> list[PassEffect[Ticket]]:
        """Record an acknowledgement, which follows `count` messages that need none."""
        self._merge(reports)
        flow = self.flow
        tickets = flow.acknowledged(sender, count)
        return self._settled(tickets) if tickets or not (flow.active or flow.unacknowledged) else []

    def island_finished(self) -> list[PassEffect[Ticket]]:
        """Record that an island has run."""
        flow = self.flow
        if flow.active > 1 or flow.unacknowledged:  # nothing can be over: the short way to what follows
            flow.active -= 1
            return []
        return self._settled(flow.idle())

    def _settled(self, tickets: list[Ticket]) -> list[PassEffect[Ticket]]:
        effects: list[PassEffect[Ticket]] = []
        for ticket in tickets:
            effects.append(Acknowledge(ticket))  # a comprehension would be one call more
        flow = self.flow
        if flow.unacknowledged or flow.active or not flow.started_here or flow.gave_up or self._ended:
            return effects
        if self._probe_flow is None or not self._probe_flow.engaged:
            self._report()
            unfed = []
            for worker, report in self._reports.items():
                if report.partly_fed:
                    unfed.append(worker)
            if unfed and not self.liveness_known:
                effects.append(self._resume() if self._probe_over else self._start_probe())
            else:
                self._ended = True
                effects.append(PassStuck(tuple(sorted(unfed))) if unfed else PASS_DONE)
        return effects

    # -- the probe ----------------------------------------------------------------------------------------------

    @property
    def _probe(self) -> Termination[Ticket]:
        if self._probe_flow is None:
            self._probe_flow = Termination()
        return self._probe_flow

    def probe_first(self) -> None:
        """Start a pass with inputs here: with the probe. Call `probe_walked` after the walk from the roots.

        `BeginPass` says when to call `begin`.
        """
        self._probing_first = True
        self._start_probe()

    def _start_probe(self) -> StartProbe:
        self._probe.start()
        return START_PROBE

    def probe_received(self, ticket: Ticket) -> list[PassEffect[Ticket]]:
        """Record a probe from another worker. Call `probe_walked` after the walk and the messages that it sends."""
        # A late probe must not engage: the worker that started the probe would never acknowledge it.
        late = self._probe_over or self.liveness_known
        tickets = [ticket] if late else self._probe.received(ticket)
        self._probe.busy()
        return [Acknowledge(ticket) for ticket in tickets]

    def probe_sent(self) -> None:
        """Record that the probe is sent to another worker."""
        self._probe.sent()

    def probe_acknowledged(
        self, reports: Mapping[int, IdleReport], sender: int | None = None, count: int = 0
    ) -> list[PassEffect[Ticket]]:
        """Record an acknowledgement of a probe that was sent."""
        self._merge(reports)
        return self._probe_settled(self._probe.acknowledged())

    def probe_walked(self) -> list[PassEffect[Ticket]]:
        """Record that a walk of the probe is done here."""
        return self._probe_settled(self._probe.idle())

    def _probe_settled(self, tickets: list[Ticket]) -> list[PassEffect[Ticket]]:
        effects: list[PassEffect[Ticket]] = [Acknowledge(ticket) for ticket in tickets]
        if self._probe.quiet and not self._probe_over and not self._ended:
            self._probe_over = True
            self._probe.engaged = False
            effects.append(BEGIN_PASS if self._probing_first else self._resume())
        return effects

    def _resume(self) -> ResumePass:
        self._report()
        self.flow.busy()  # until every worker is told: see `resume_sent`
        return ResumePass(tuple(sorted(worker for worker in self._reports if worker != self.me)))

    def replan(self, islands: Mapping[int, Collection[Entry]]) -> list[PassEffect[Ticket]]:
        """Continue after the probe with these islands, of live entries only, in place of those that wait."""
        self.liveness_known = True
        self.plan(islands)
        return [effect for number in islands for effect in self._start(number)]

    def resume_sent(self) -> list[PassEffect[Ticket]]:
        """Record, where the pass started, that every worker was told that the probe is over."""
        return self._settled(self.flow.idle())

    def resume_received(self, ticket: Ticket) -> list[PassEffect[Ticket]]:
        """Record a message that the probe is over. The caller calls `replan` first, unless it was called before."""
        return self.late_message(ticket)

    # -- reports ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        self._number += 1
        self._reports[self.me] = IdleReport(self._number, self._partly_fed > 0)

    def reports(self) -> dict[int, IdleReport]:
        """Return what to send with an acknowledgement: the newest report of every known worker, including this one."""
        self._report()
        return dict(self._reports)

    def _merge(self, reports: Mapping[int, IdleReport]) -> None:
        for worker, report in reports.items():
            known = self._reports.get(worker)
            if known is None or known.number < report.number:
                self._reports[worker] = report

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def engaged(self) -> bool:
        """Whether this worker still takes part in the pass."""
        probing = self._probe_flow is not None and self._probe_flow.engaged
        return (self.flow.engaged or probing or self._probing_first) and not self._ended

    @property
    def running(self) -> int:
        """How many islands run here."""
        return self.flow.active

    @property
    def unacknowledged(self) -> int:
        """How many of our messages are not acknowledged."""
        return self.flow.unacknowledged + self._probe.unacknowledged

    def abort(self) -> list[PassEffect[Ticket]]:
        """End the pass because it failed, and acknowledge the messages whose senders wait for it."""
        self._ended = True
        return [Acknowledge(ticket) for ticket in (*self.flow.give_up(), *self._probe.give_up())]
