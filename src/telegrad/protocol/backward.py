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


class BackwardPass(Generic[Ticket]):
    """The state of one pass at worker `me`. Call `plan` before the first gradient arrives; `begin` starts the pass."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.liveness_known = False
        """The probe is over, so it is known which entries are alive."""
        self.planned = False
        self._islands: dict[int, _Island] = {}
        self._island_of: dict[Entry, int] = {}
        self._flow: Termination[Ticket] = Termination()
        self._probe_flow: Termination[Ticket] | None = None  # created on demand: most passes have no probe
        self._reports: dict[int, IdleReport] = {}
        self._number = 0
        self._probing_first = False
        self._probe_over = False
        self._ended = False

    # -- islands ------------------------------------------------------------------------------------------------

    def plan(self, islands: Mapping[int, Collection[Entry]]) -> None:
        """Set which entries form which islands. Islands that have started do not change."""
        self.planned = True
        before = self._islands
        if before:
            self._islands = {number: island for number, island in before.items() if island.started}
            self._island_of = {entry: number for number, island in self._islands.items() for entry in island.entries}
        for number, entries in islands.items():
            self._islands[number] = _Island(frozenset(entries))
            for entry in entries:
                self._island_of[entry] = number
        for island in before.values() if before is not self._islands else ():
            for entry in island.arrived:
                now = self._island_of.get(entry)
                if now is not None:
                    self._islands[now].arrived.add(entry)

    def add_island(self, number: int, entries: Iterable[Entry]) -> None:
        """Add an island of entries that did not exist when the others were planned."""
        self._islands[number] = island = _Island(frozenset(entries))
        for entry in island.entries:
            self._island_of[entry] = number

    def has_entry(self, entry: Entry) -> bool:
        """Return whether an island has this entry."""
        return entry in self._island_of

    def started_entries(self) -> set[Entry]:
        """Return the entries of islands that have started."""
        return {entry for island in self._islands.values() if island.started for entry in island.entries}

    def partly_fed(self) -> bool:
        """Return whether an island here has some of its gradients and waits for the rest."""
        for island in self._islands.values():  # noqa: SIM110 - any() would make a generator, on every pass
            if island.arrived and not island.started:
                return True
        return False

    def _start(self, number: int) -> list[PassEffect[Ticket]]:
        island = self._islands[number]
        if self._ended or island.started or not island.arrived:
            return []
        complete = len(island.arrived) == len(island.entries)
        if not complete and not self.liveness_known:
            return []
        island.started = True
        self._flow.active += 1
        return [StartIsland(number, () if complete else tuple(sorted(island.entries - island.arrived, key=str)))]

    # -- the flow of gradients ----------------------------------------------------------------------------------

    def begin(self) -> list[PassEffect[Ticket]]:
        """Start the pass here: the gradients of the roots have arrived."""
        self._probing_first = False
        self._flow.start()
        effects = self._arrive(ROOT)
        return effects + self._settled(self._flow.idle())

    def gradient(self, ticket: Ticket | None, entry: Entry, sender: int | None = None) -> list[PassEffect[Ticket]]:
        """Record the gradient of one of our sends. Without a ticket it is counted, and not acknowledged."""
        flow = self._flow
        tickets = flow.received(ticket, sender)
        effects = self._arrive(entry)
        if not effects:  # otherwise this worker is active, and nothing can be over
            tickets += flow.settle()
        return effects + self._settled(tickets) if tickets or not effects else effects

    def _arrive(self, entry: Entry) -> list[PassEffect[Ticket]]:
        number = self._island_of.get(entry)
        if number is None:
            return []
        island = self._islands[number]
        island.arrived.add(entry)
        return self._start(number)

    def late_message(self, ticket: Ticket | None, sender: int | None = None) -> list[PassEffect[Ticket]]:
        """Record a message that changes nothing here (late, or a duplicate)."""
        tickets = self._flow.received(ticket, sender)
        tickets += self._flow.settle()
        return self._settled(tickets)

    def sent(self, to: int | None = None) -> bool:
        """Record that a gradient or a resume message is sent. Return whether it must be acknowledged."""
        return self._flow.sent(to)

    def count_for(self, worker: int) -> int:
        """Return the count to put into an acknowledgement to `worker`: messages to it that need none themselves."""
        return self._flow.count_for(worker)

    def acknowledged(
        self, reports: Mapping[int, IdleReport], sender: int | None = None, count: int = 0
    ) -> list[PassEffect[Ticket]]:
        """Record an acknowledgement, which follows `count` messages that need none."""
        self._merge(reports)
        return self._settled(self._flow.acknowledged(sender, count))

    def island_finished(self) -> list[PassEffect[Ticket]]:
        """Record that an island has run."""
        return self._settled(self._flow.idle())

    def _settled(self, tickets: list[Ticket]) -> list[PassEffect[Ticket]]:
        effects: list[PassEffect[Ticket]] = []
        for ticket in tickets:
            effects.append(Acknowledge(ticket))  # a comprehension would be one call more
        flow = self._flow
        if flow.unacknowledged or flow.active or not flow.quiet or self._ended:
            return effects
        if self._probe_flow is None or not self._probe_flow.engaged:
            self._report()
            unfed = [worker for worker, report in self._reports.items() if report.partly_fed]
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
        self._flow.busy()  # until every worker is told: see `resume_sent`
        return ResumePass(tuple(sorted(worker for worker in self._reports if worker != self.me)))

    def replan(self, islands: Mapping[int, Collection[Entry]]) -> list[PassEffect[Ticket]]:
        """Continue after the probe with these islands, of live entries only, in place of those that wait."""
        self.liveness_known = True
        self.plan(islands)
        return [effect for number in islands for effect in self._start(number)]

    def resume_sent(self) -> list[PassEffect[Ticket]]:
        """Record, where the pass started, that every worker was told that the probe is over."""
        return self._settled(self._flow.idle())

    def resume_received(self, ticket: Ticket) -> list[PassEffect[Ticket]]:
        """Record a message that the probe is over. The caller calls `replan` first, unless it was called before."""
        return self.late_message(ticket)

    # -- reports ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        self._number += 1
        self._reports[self.me] = IdleReport(self._number, self.partly_fed())

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
        return (self._flow.engaged or probing or self._probing_first) and not self._ended

    @property
    def running(self) -> int:
        """How many islands run here."""
        return self._flow.active

    @property
    def unacknowledged(self) -> int:
        """How many of our messages are not acknowledged."""
        return self._flow.unacknowledged + self._probe.unacknowledged

    def abort(self) -> list[PassEffect[Ticket]]:
        """End the pass because it failed, and acknowledge the messages whose senders wait for it."""
        self._ended = True
        return [Acknowledge(ticket) for ticket in (*self._flow.give_up(), *self._probe.give_up())]
