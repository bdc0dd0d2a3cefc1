"""The plan of a universe, drawn from a seed: its workers, their programs, and the faults that happen to them.

>>> draw_plan(7) == draw_plan(7)
True
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FOREVER = 1e9
"""Seconds: a fault of this length does not end."""
LOSING = 20.0
"""Seconds: a worker that is cut off or stopped for longer may be lost. Sessions allow 30; other faults take some."""
ENDS_HANDSHAKES = 8.0
"""Seconds: a delay of more may end a handshake, which may take 10. Over unix sockets that looks like death."""

_NUMBERS_OF_WORKERS = (2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8, 10, 12)
_ACTIONS = {
    "call": 6,
    "calls": 3,
    "coroutine": 1,
    "fail": 1,
    "create": 4,
    "own": 1,
    "fetch": 3,
    "share": 3,
    "pass on": 2,
    "drop": 2,
    "actor": 2,
    "train": 2,
    "sleep": 1,
}
_MILD = ("noise", "cut", "half open", "stall", "slow", "freeze", "jump", "one-way", "partition")
_SEVERE = (*_MILD, "kill", "kill", "restart", "restart", "rejoin", "contest", "leave", "harsh noise")
_ON_ONE_HOST = ("kill", "restart", "rejoin", "leave", "slow", "freeze", "jump", "stall")


@dataclass(frozen=True)
class Action:
    """Something that a program does. What the numbers mean depends on the kind."""

    kind: str
    workers: tuple[str, ...] = ()
    size: int = 0
    count: int = 1
    timeout: float = 0.0
    flag: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind, *self.workers]
        for name, value in (("size", self.size), ("count", self.count), ("timeout", self.timeout)):
            if value and (name, value) != ("count", 1):
                parts.append(f"{name}={value}")
        if self.seconds:
            parts.append(f"{self.seconds:.3g} s")
        return " ".join([*parts, "+"] if self.flag else parts)


@dataclass(frozen=True)
class Fault:
    """Something that happens to workers, `at` seconds after the start, for some `seconds`."""

    at: float
    kind: str
    workers: tuple[str, ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        length = "for ever" if self.seconds >= FOREVER else f"for {self.seconds:.3g} s"
        return f"{self.kind} of {' and '.join(self.workers) or 'the network'} {length if self.seconds else ''}".strip()

    def may_lose(self, resumable: bool) -> bool:
        """Return whether a worker may be lost because of it."""
        if self.kind in ("kill", "restart", "rejoin", "contest", "usurpation", "leave", "harsh noise"):
            return True
        return self.seconds > (LOSING if resumable and self.kind != "jump" else ENDS_HANDSHAKES)


@dataclass(frozen=True)
class Plan:
    """Everything that a seed decides, except how threads and frames interleave."""

    seed: int
    workers: tuple[str, ...]
    resumable: bool
    reorders: bool
    longest_delay: float
    rpc_timeout: float
    credits: int
    shutdown_timeout: float
    programs: tuple[tuple[str, tuple[Action, ...]], ...]
    gathers: tuple[tuple[str, ...], ...]
    """The collectives, by their members. All members run them in this order when their other actions are done."""
    autograd_program: int | None = None
    """The seed of a program of `telegrad.testing.programs` that runs on some of the workers."""
    faults: tuple[Fault, ...] = field(default=())

    @property
    def fan_out(self) -> int:
        """How many members are below each one in the trees of collectives. 16: they are stars."""
        return random.Random(f"fan-out {self.seed}").choice((1, 2, 3, 16))

    @property
    def is_open(self) -> bool:
        """Whether workers with new names may join the group: some do."""
        return any(fault.kind in ("join", "visit") for fault in self.faults)

    def __str__(self) -> str:
        network = "tcp" if self.resumable else "unix"
        lines = [
            f"seed {self.seed}: {len(self.workers)} workers over {network}, delays up to {self.longest_delay:g} s, "
            f"{self.credits} credits, timeout {self.rpc_timeout:g}{', lanes reorder' if self.reorders else ''}"
            f"{', open' if self.is_open else ''}, fan-out {self.fan_out}"
        ]
        lines += [f"  {worker}: {'; '.join(map(str, actions))}" for worker, actions in self.programs]
        lines += [f"  gather of {' '.join(members)}" for members in self.gathers]
        if self.autograd_program is not None:
            lines.append(f"  autograd program {self.autograd_program}")
        lines += [f"  {fault.at:.4f}: {fault}" for fault in self.faults]
        return "\n".join(lines)


def draw_plan(seed: int) -> Plan:
    """Draw the plan of a seed."""
    draw = random.Random(f"universe {seed}")
    workers = tuple(f"w{number}" for number in range(draw.choice(_NUMBERS_OF_WORKERS)))
    resumable = draw.random() < 0.85
    starters = draw.sample(workers, draw.randint(1, min(3, len(workers))))
    programs = tuple(
        (worker, tuple(draw_action(draw, workers) for _ in range(draw.randint(1, 6)))) for worker in starters
    )
    gathers = tuple(
        tuple(sorted(draw.sample(workers, draw.randint(2, min(4, len(workers))))))
        for _ in range(draw.choice((0, 0, 0, 0, 1, 2)))
    )
    programs = _draw_persistence(random.Random(f"persistence {seed}"), workers, programs)
    programs = _draw_retries(random.Random(f"retries {seed}"), workers, programs)
    mood = draw.random()
    kinds: tuple[str, ...] = ()
    if mood > 0.12:
        kinds = (_MILD if mood < 0.45 else _SEVERE) if resumable else _ON_ONE_HOST
    short = mood < 0.45
    faults = _draw_faults(draw, workers, kinds, short)
    apart = random.Random(f"usurpation {seed}")
    if resumable and not short and len(workers) > 2 and apart.random() < 0.05:
        faults.append(Fault(0.01 * apart.random(), "usurpation", (apart.choice(workers),), 140.0))
    faults += _draw_newcomers(random.Random(f"newcomers {seed}"), workers, resumable and not short)
    return Plan(
        seed,
        workers,
        resumable,
        reorders=resumable and draw.random() < 0.3,
        longest_delay=draw.choice((0.001, 0.005, 0.005, 0.02)),
        rpc_timeout=draw.choice((0.0, 0.0, 60.0)),
        credits=draw.choice((1024, 1024, 2, 4)),
        shutdown_timeout=draw.choice((0.0, 0.0, 300.0)),
        programs=programs,
        gathers=gathers,
        autograd_program=draw.getrandbits(30) if draw.random() < 0.15 else None,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _draw_persistence(
    draw: random.Random, workers: tuple[str, ...], programs: tuple[tuple[str, tuple[Action, ...]], ...]
) -> tuple[tuple[str, tuple[Action, ...]], ...]:
    """Let some programs begin with a context that is used again after its workers may have been replaced."""
    if draw.random() > 0.12:
        return programs
    route = tuple(draw.choice(workers) for _ in range(draw.randint(1, 3)))
    pause = draw.choice((0.02, 1.0, 20.0, 100.0)) * draw.random()
    action = Action("persist", route, count=draw.randint(2, 3), flag=draw.random() < 0.5, seconds=pause)
    (worker, actions), *others = programs
    return ((worker, (action, *actions)), *others)


def _draw_retries(
    draw: random.Random, workers: tuple[str, ...], programs: tuple[tuple[str, tuple[Action, ...]], ...]
) -> tuple[tuple[str, tuple[Action, ...]], ...]:
    """Let some programs end with calls that are made again if their callee is lost and replaced."""
    if draw.random() > 0.12:
        return programs
    pause = draw.choice((0.002, 0.1, 2.0, 8.0)) * draw.random()  # a function runs on if its worker leaves meanwhile
    action = Action("retry", (draw.choice(workers),), count=draw.randint(1, 4), flag=draw.random() < 0.5, seconds=pause)
    (worker, actions), *others = programs
    return ((worker, (*actions, action)), *others)


def _draw_newcomers(draw: random.Random, workers: tuple[str, ...], may_part: bool) -> list[Fault]:
    """Draw workers that join an open group under new names. Most groups are not open."""
    if draw.random() > 0.15:
        return []
    scale = draw.choice((0.01, 0.05, 0.3))
    faults = []
    for number in range(draw.choice((1, 1, 2, 3))):
        name, at = f"n{number}", scale * draw.random()
        kind = draw.choice(("join", "join", "visit"))
        seconds = draw.choice((0.02, 0.5, 10.0) if kind == "visit" else (0.0, 0.0, 0.05, 1.0)) * draw.random()
        faults.append(Fault(at, kind, (name,), seconds))
        if may_part and draw.random() < 0.2:
            apart = draw.choice((0.5, 12.0, 80.0)) * draw.random()
            when = at * draw.uniform(0.5, 1.5)
            faults.append(Fault(when, draw.choice(("partition", "one-way")), (name, draw.choice(workers)), apart))
    return faults


def draw_action(draw: random.Random, workers: tuple[str, ...]) -> Action:
    """Draw something that a program does, with some of these workers."""
    kind = draw.choices(list(_ACTIONS), list(_ACTIONS.values()))[0]
    count = draw.randint(1, 4)
    targets = tuple(draw.choice(workers) for _ in range(draw.randint(1, 3)))
    return Action(
        kind,
        targets,
        size=draw.choice((0, 0, 0, 100, 200_000)) if kind in ("call", "calls", "actor", "create") else 0,
        count=count,
        timeout=draw.choice((0.0,) * 5 + (0.005, 0.03)) if kind in ("call", "calls", "coroutine") else 0.0,
        flag=draw.random() < 0.3,
        seconds=draw.choice((0.01, 0.2, 2.0, 40.0)) * draw.random() if kind in ("sleep", "coroutine") else 0.0,
    )


def _draw_faults(draw: random.Random, workers: tuple[str, ...], kinds: tuple[str, ...], short: bool) -> list[Fault]:
    if not kinds:
        return []
    scale = draw.choice((0.01, 0.05, 0.3, 3.0))  # of the times: most programs take a fraction of a second
    faults = []
    killed = 0
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5))):
        kind = draw.choice(kinds)
        if kind in ("kill", "restart", "rejoin", "contest", "leave"):
            killed += 1
            if killed >= max(2, len(workers) - 1):
                continue
        at, seconds = scale * draw.random(), 0.0
        if kind in ("noise", "harsh noise"):
            chosen: tuple[str, ...] = ()
            seconds = draw.choice((0.1, 1.0, 10.0))
        elif kind in ("kill", "leave", "restart", "rejoin", "contest", "slow", "freeze", "jump"):
            chosen = (draw.choice(workers),)
        else:
            chosen = tuple(draw.sample(workers, 2))
        if kind in ("slow", "freeze", "jump", "stall", "one-way", "partition", "half open"):
            lengths = (0.005, 0.1, 2.0, 8.0) if short else (0.1, 2.0, 12.0, 35.0, 80.0)
            seconds = draw.choice(lengths) * draw.uniform(0.5, 1.0)
            if kind in ("one-way", "partition") and not short and draw.random() < 0.3:
                seconds = FOREVER
        if kind == "half open":
            seconds = min(seconds, 5.0)
        if kind in ("restart", "rejoin", "contest"):
            seconds = draw.choice((0.0, 0.01, 0.5, 5.0, 50.0))
        faults.append(Fault(at, kind, chosen, seconds))
    return faults
