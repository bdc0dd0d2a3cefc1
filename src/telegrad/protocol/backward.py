"""One backward pass, at one worker: which islands may start, who waits for whom, and when it is over.

The words are those of the design: gradients *enter* a worker's graph at its roots and at its sends; entries that reach
a common node form an *island*, and an island is run once, by torch's engine.

The rules:

1. An island starts when all its entries have arrived.
2. When the whole group is quiet (see `diffusion`) and no island anywhere is partly fed, the pass is over.
3. When it is quiet and some island is partly fed, then either what an entry carried was not used, or the island must
   run to produce the very gradient that it waits for. Now the *probe* walks from the roots over all workers and marks
   the sent tensors that this pass will reach. Entries that were not reached are dead, and forgotten.
4. After the probe, everything that waits is planned again, and starts as soon as one entry has arrived; entries that
   are alive and have not arrived get a *gate*, a node that waits inside the running island.
5. There is at most one probe. If islands are partly fed when all is quiet again, a rule above is broken, and the pass
   says so rather than wait.
6. A pass with inputs begins with the probe, which then also finds what leads to the inputs (see `survey`). If it is
   quiet with an island partly fed, everything is known already, and the pass goes on as after the probe.
7. When the pass is over, or has failed here, or the probe is over, messages of it that come late or twice are answered
   at once and change nothing.

Every worker reports, with each answer that it gives last (rule 1 of diffusion), whether islands are partly fed here.
Reports travel up to the worker that began the pass; each has a number, so an old one never replaces a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from telegrad.protocol.termination import Termination

Entry = Hashable
"""An entry: `ROOT`, or the message id of a send."""
ROOT = "root"
Ticket = TypeVar("Ticket")


class Report(msgspec.Struct, frozen=True):
    """What a worker says of itself when it falls idle."""

    number: int
    partly_fed: bool


class Answer(msgspec.Struct, Generic[Ticket], frozen=True):
    """Answer this message now, with `reports`."""

    ticket: Ticket


class Start(msgspec.Struct, frozen=True):
    """Run this island. `waiting` are its entries that have not arrived: they get gates."""

    island: int
    waiting: tuple[Entry, ...] = ()


class Probe(msgspec.Struct, frozen=True):
    """Begin the probe: walk from the roots."""


class Begin(msgspec.Struct, frozen=True):
    """The survey is over: plan, and begin."""


class Resume(msgspec.Struct, frozen=True):
    """The probe is over: tell these workers, and plan again."""

    workers: tuple[int, ...]


class Done(msgspec.Struct, frozen=True):
    """The pass is over, everywhere."""


class Stuck(msgspec.Struct, frozen=True):
    """Rule 5: islands of these workers are partly fed, and nothing will come."""

    workers: tuple[int, ...]


PROBE: Final = Probe()
BEGIN: Final = Begin()
DONE: Final = Done()

Effect = Answer[Ticket] | Start | Probe | Begin | Resume | Done | Stuck


class _Island(msgspec.Struct, eq=False):
    entries: frozenset[Entry]
    arrived: set[Entry] = msgspec.field(default_factory=set)
    started: bool = False


class Pass(Generic[Ticket]):
    """One pass at worker `me`. `begin` is called where it starts, `plan` everywhere before the first arrival."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.known = False
        """The probe is over, so it is known which entries are alive."""
        self.planned = False
        self._islands: dict[int, _Island] = {}
        self._island_of: dict[Entry, int] = {}
        self._flow: Termination[Ticket] = Termination()
        self._probe_flow: Termination[Ticket] | None = None  # nearly every pass does without
        self._reports: dict[int, Report] = {}
        self._number = 0
        self._surveying = False
        self._probe_over = False
        self._ended = False

    # -- plan -------------------------------------------------------------------------------------------------

    def plan(self, islands: Mapping[int, Collection[Entry]]) -> None:
        """Say which entries form which islands; those that have started stay as they are."""
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

    def grow(self, number: int, entries: Iterable[Entry]) -> None:
        """Add an island, of entries that did not exist when the others were planned."""
        self._islands[number] = island = _Island(frozenset(entries))
        for entry in island.entries:
            self._island_of[entry] = number

    def has(self, entry: Entry) -> bool:
        """Whether an island has this entry."""
        return entry in self._island_of

    def started_entries(self) -> set[Entry]:
        """Entries of islands that have started."""
        return {entry for island in self._islands.values() if island.started for entry in island.entries}

    def partly_fed(self) -> bool:
        """Whether an island here waits for the rest of its entries."""
        for island in self._islands.values():  # noqa: SIM110 - any() would make a generator, on every pass
            if island.arrived and not island.started:
                return True
        return False

    def _start(self, number: int) -> list[Effect[Ticket]]:
        island = self._islands[number]
        if self._ended or island.started or not island.arrived:
            return []
        complete = len(island.arrived) == len(island.entries)
        if not complete and not self.known:
            return []
        island.started = True
        self._flow.active += 1
        return [Start(number, () if complete else tuple(sorted(island.entries - island.arrived, key=str)))]

    # -- the flow of gradients --------------------------------------------------------------------------------

    def begin(self) -> list[Effect[Ticket]]:
        """The pass starts here: the roots have arrived."""
        self._surveying = False
        self._flow.start()
        effects = self._arrive(ROOT)
        return effects + self._settled(self._flow.idle())

    def gradient(self, ticket: Ticket | None, entry: Entry, sender: int | None = None) -> list[Effect[Ticket]]:
        """The gradient of one of our sends came; without a ticket it is counted, and not answered."""
        flow = self._flow
        answers = flow.received(ticket, sender)
        effects = self._arrive(entry)
        if not effects:  # else this worker is active, and nothing can be over
            answers += flow.settle()
        return effects + self._settled(answers) if answers or not effects else effects

    def _arrive(self, entry: Entry) -> list[Effect[Ticket]]:
        number = self._island_of.get(entry)
        if number is None:
            return []
        island = self._islands[number]
        island.arrived.add(entry)
        return self._start(number)

    def nothing_new(self, ticket: Ticket | None, sender: int | None = None) -> list[Effect[Ticket]]:
        """A message came that changes nothing here (late, or twice)."""
        answers = self._flow.received(ticket, sender)
        answers += self._flow.settle()
        return self._settled(answers)

    def sent(self, to: int | None = None) -> bool:
        """A gradient, or word that the probe is over, leaves for another worker; says whether it is to be answered."""
        return self._flow.sent(to)

    def count_for(self, worker: int) -> int:
        """What an answer to this worker says: how many messages it was sent that need no answer."""
        return self._flow.count_for(worker)

    def answered(
        self, reports: Mapping[int, Report], sender: int | None = None, count: int = 0
    ) -> list[Effect[Ticket]]:
        """Such a message was answered; `count` messages that need no answer came, or come, before it."""
        self._merge(reports)
        return self._settled(self._flow.answered(sender, count))

    def ended(self) -> list[Effect[Ticket]]:
        """An island has run."""
        return self._settled(self._flow.idle())

    def _settled(self, tickets: list[Ticket]) -> list[Effect[Ticket]]:
        effects: list[Effect[Ticket]] = []
        for ticket in tickets:
            effects.append(Answer(ticket))  # a comprehension would be one call more
        flow = self._flow
        if flow.owed or flow.active or not flow.quiet or self._ended:
            return effects
        if self._probe_flow is None or not self._probe_flow.engaged:
            self._report()
            unfed = [worker for worker, report in self._reports.items() if report.partly_fed]
            if unfed and not self.known:
                effects.append(self._resume() if self._probe_over else self._start_probe())
            else:
                self._ended = True
                effects.append(Stuck(tuple(sorted(unfed))) if unfed else DONE)
        return effects

    # -- the probe --------------------------------------------------------------------------------------------

    @property
    def _probe(self) -> Termination[Ticket]:
        if self._probe_flow is None:
            self._probe_flow = Termination()
        return self._probe_flow

    def survey(self) -> None:
        """The pass is about to start here, with inputs: probe first. Say `probe_walked` after the walk from the roots.

        `Begin` says when it is time to `begin`.
        """
        self._surveying = True
        self._start_probe()

    def _start_probe(self) -> Probe:
        self._probe.start()
        return PROBE

    def probed(self, ticket: Ticket) -> list[Effect[Ticket]]:
        """The probe came from another worker. Say `probe_walked` when the walk, and what it sends, is done."""
        # A probe that comes late must not engage: at the worker that began it, nothing would answer it any more.
        late = self._probe_over or self.known
        answers = [ticket] if late else self._probe.received(ticket)
        self._probe.busy()
        return [Answer(answer) for answer in answers]

    def probe_sent(self) -> None:
        """The probe goes on to another worker."""
        self._probe.sent()

    def probe_answered(
        self, reports: Mapping[int, Report], sender: int | None = None, count: int = 0
    ) -> list[Effect[Ticket]]:
        """Such a message was answered."""
        self._merge(reports)
        return self._probe_settled(self._probe.answered())

    def probe_walked(self) -> list[Effect[Ticket]]:
        """A walk of the probe is done here."""
        return self._probe_settled(self._probe.idle())

    def _probe_settled(self, tickets: list[Ticket]) -> list[Effect[Ticket]]:
        effects: list[Effect[Ticket]] = [Answer(ticket) for ticket in tickets]
        if self._probe.quiet and not self._probe_over and not self._ended:
            self._probe_over = True
            self._probe.engaged = False
            effects.append(BEGIN if self._surveying else self._resume())
        return effects

    def _resume(self) -> Resume:
        self._report()
        self._flow.busy()  # until everybody is told: see `resumed_here`
        return Resume(tuple(sorted(worker for worker in self._reports if worker != self.me)))

    def learn(self, islands: Mapping[int, Collection[Entry]]) -> list[Effect[Ticket]]:
        """The probe is over: go on with these islands, of live entries only, in place of those that wait."""
        self.known = True
        self.plan(islands)
        return [effect for number in islands for effect in self._start(number)]

    def resumed_here(self) -> list[Effect[Ticket]]:
        """Where the pass began: everybody has been told."""
        return self._settled(self._flow.idle())

    def resumed(self, ticket: Ticket) -> list[Effect[Ticket]]:
        """Word came that the probe is over. `learn` was called before, or is called now by whoever calls this."""
        return self.nothing_new(ticket)

    # -- reports ----------------------------------------------------------------------------------------------

    def _report(self) -> None:
        self._number += 1
        self._reports[self.me] = Report(self._number, self.partly_fed())

    def reports(self) -> dict[int, Report]:
        """What to send with an answer: the newest that is known of every worker, this one included."""
        self._report()
        return dict(self._reports)

    def _merge(self, reports: Mapping[int, Report]) -> None:
        for worker, report in reports.items():
            known = self._reports.get(worker)
            if known is None or known.number < report.number:
                self._reports[worker] = report

    # -- the end ----------------------------------------------------------------------------------------------

    @property
    def engaged(self) -> bool:
        """Whether this worker still has part in the pass."""
        probing = self._probe_flow is not None and self._probe_flow.engaged
        return (self._flow.engaged or probing or self._surveying) and not self._ended

    @property
    def running(self) -> int:
        """How many islands run here."""
        return self._flow.active

    @property
    def owed(self) -> int:
        """How many of our messages are not answered."""
        return self._flow.owed + self._probe.owed

    def abort(self) -> list[Effect[Ticket]]:
        """The pass failed: whoever waits for our answer gets it."""
        self._ended = True
        return [Answer(ticket) for ticket in (*self._flow.release(), *self._probe.release())]
