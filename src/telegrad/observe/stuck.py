"""Finds out of the views of a group what is stuck, and why: a tree of calls over workers, and the wait cycles.

A pure function of the views. The rules:

1. A served call *waits* for another if its worker says so (`Wait.for_call` and `Wait.call`): for a reply, for its turn
   at an ordered object, or for a value that the other call computes.
2. A member of a collective waits for the workers that have not come, and so for whatever their own threads, which serve
   no call, wait for.
3. Calls that wait for each other in a circle never end, unless somebody else ends one of them. They are a *cycle*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from telegrad.observe.model import CallKey, Frame, GroupView, LiveCall, PassView, Wait, WorkerView
from telegrad.observe.wait_cycles import find_cycles

_DEEPEST = 100
"""Calls below each other in one tree. What is below is a tree of its own: functions that call each other without end
make thousands, and whoever walks a tree has a stack."""

_SHUTDOWN = "shutdown"
_COLLECTIVES = ("barrier", _SHUTDOWN)
"""Kinds of waits for workers that have not come."""


class StuckNode(msgspec.Struct, frozen=True):
    """A call, a pass, or a wait of a thread, and what it waits for."""

    kind: str
    """"call", "pass" or "wait"."""
    title: str
    worker: str
    """Where it runs."""
    age: float
    key: CallKey | None = None
    function: str = ""
    state: str = ""
    where: str = ""
    stack: tuple[Frame, ...] = ()
    waits: tuple[str, ...] = ()
    """What it waits for, in words."""
    children: tuple[StuckNode, ...] = ()
    """The calls that it waits for."""
    repeated: bool = False
    """Whether it is shown above, in full."""
    expected: bool = False
    """Whether it is what workers do that only serve, or whose program is over: they wait in ``shutdown()``."""


class CycleStep(msgspec.Struct, frozen=True):
    """One call of a cycle, and how it waits for the next."""

    key: CallKey
    worker: str
    function: str
    age: float
    where: str
    waits_for: str


class StuckReport(msgspec.Struct, frozen=True):
    """What is stuck in a group."""

    older: float
    roots: tuple[StuckNode, ...] = ()
    cycles: tuple[tuple[CycleStep, ...], ...] = ()
    silent: dict[str, str] = {}


class _Index:
    """The calls and waits of all workers."""

    def __init__(self, group: GroupView) -> None:
        self.workers = {view.name: view for view in group.workers}
        self.made: dict[CallKey, LiveCall] = {}
        self.served: dict[CallKey, tuple[WorkerView, LiveCall]] = {}
        self.waits: dict[CallKey, list[Wait]] = {}
        self.own_waits: dict[str, list[Wait]] = {}
        self.cut: list[CallKey] = []
        """Calls that are not shown below those that wait for them."""
        for view in group.workers:
            for call in view.made:
                self.made[call.caller, call.id] = call
            for call in view.served:
                self.served[call.caller, call.id] = view, call
            for wait in view.waits:
                if wait.for_call is not None:
                    self.waits.setdefault(wait.for_call, []).append(wait)
                else:
                    self.own_waits.setdefault(view.name, []).append(wait)

    def age(self, key: CallKey) -> float:
        """Return the age of a call: since it was made, or else since it arrived."""
        made = self.made.get(key)
        if made is not None:
            return self.workers[made.caller].now - made.began
        view, call = self.served[key]
        return view.now - call.began

    def knows(self, key: CallKey) -> bool:
        return key in self.made or key in self.served

    def text(self, wait: Wait) -> str:
        """Return what a wait is for, with the name that the callee knows the function by."""
        served = self.served.get(wait.call) if wait.call is not None else None
        if wait.kind != "reply" or served is None or wait.call is None:
            return wait.text
        return f"the reply to {served[1].function} on worker {served[0].name!r} (call {wait.call[1]})"

    def distinct_waits(self, key: CallKey) -> list[Wait]:
        """Return what a call waits for. Several threads may wait for the same, as while a deadline is explained."""
        return list({self.text(wait): wait for wait in self.waits.get(key, ())}.values())

    def following(self, key: CallKey) -> list[tuple[CallKey, str]]:
        """Return the calls that a call waits for, and how. Number 0 stands for a worker's own threads."""
        if key[1] == 0:
            waits = [wait for wait in self.own_waits.get(key[0], ()) if wait.call is not None]
            return [(wait.call, wait.text) for wait in waits if wait.call is not None]
        found: list[tuple[CallKey, str]] = []
        for wait in self.waits.get(key, ()):
            if wait.call is not None:
                found.append((wait.call, self.text(wait)))
            elif wait.kind in _COLLECTIVES:
                found += [((name, 0), wait.text) for name in wait.workers if name in self.workers]
        return found


def analyze(group: GroupView, older: float = 0.0, focus: CallKey | None = None) -> StuckReport:
    """Return what is older than so many seconds, as trees, and all cycles. `focus` names the only call to show."""
    index = _Index(group)
    keys = {*index.made, *index.served}
    cycles = find_cycles({key: [to for to, _ in index.following(key)] for key in keys | _threads(index)})
    described = tuple(_describe_cycle(index, cycle) for cycle in cycles)
    if focus is not None and index.knows(focus):
        return StuckReport(older, (_call_node(index, focus, set()),), described, group.silent)
    old = [key for key in keys if index.age(key) >= older]
    awaited = {to for key in old for to, _ in index.following(key) if to != key}
    roots = sorted((key for key in old if key not in awaited), key=lambda key: -index.age(key))
    seen: set[CallKey] = set()
    nodes = [_call_node(index, key, seen) for key in roots]
    while index.cut:
        key = index.cut.pop()
        nodes += [_call_node(index, key, seen)] if key not in seen else []
    # Calls in cycles await each other, so none of them need be a root.
    nodes += [_call_node(index, key, seen) for key in sorted(old, key=index.age, reverse=True) if key not in seen]
    for view in group.workers:
        nodes += [_pass_node(view, each) for each in view.passes if view.now - each.began >= older]
        nodes += [
            _wait_node(view, wait)
            for wait in index.own_waits.get(view.name, ())
            if wait.call is None and wait.kind not in ("gate", "slot") and view.now - wait.since >= older
        ]
    return StuckReport(older, tuple(nodes), described, group.silent)


def _threads(index: _Index) -> set[CallKey]:
    return {(name, 0) for name in index.workers}


def _describe_cycle(index: _Index, cycle: Sequence[CallKey]) -> tuple[CycleStep, ...]:
    steps = []
    for number, key in enumerate(cycle):
        to = cycle[(number + 1) % len(cycle)]
        how = next(text for other, text in index.following(key) if other == to)
        if key[1] == 0:
            made = index.made.get(to)
            where = made.where if made is not None else ""
            steps.append(CycleStep(key, key[0], "a thread of the program", 0.0, where, how))
            continue
        worker, function = _place(index, key)
        steps.append(CycleStep(key, worker, function, index.age(key), _where(index, key), how))
    return tuple(steps)


def _place(index: _Index, key: CallKey) -> tuple[str, str]:
    """Return where a call runs, and its function."""
    served = index.served.get(key)
    if served is not None:
        return served[0].name, served[1].function
    made = index.made[key]
    return made.callee, made.function or "a function by value"


def _where(index: _Index, key: CallKey) -> str:
    """Return the line that a call is in; for one that does not run, the line that made it."""
    served, made = index.served.get(key), index.made.get(key)
    if served is not None and served[1].where:
        return served[1].where
    return f"called at {made.where}" if made is not None and made.where else ""


def _call_node(index: _Index, key: CallKey, seen: set[CallKey], depth: int = 0) -> StuckNode:
    worker, function = _place(index, key)
    served, made = index.served.get(key), index.made.get(key)
    state = _state(index, key, worker)
    stack: tuple[Frame, ...] = ()
    if served is not None and served[1].thread:
        stack = served[0].stacks.get(served[1].thread, ())
    deadline = ""
    if made is not None and made.deadline is not None:
        left = made.deadline - index.workers[made.caller].now
        deadline = f", deadline in {left:.1f} s" if left >= 0.05 else ", its deadline has passed"
    title = f"call {key[1]}: {key[0]!r} -> {worker!r}: {function}, {state}, {index.age(key):.1f} s old{deadline}"
    repeated = key in seen
    seen.add(key)
    children: list[StuckNode] = []
    texts: list[str] = []
    if not repeated:
        for wait in index.distinct_waits(key):
            texts.append(f"waits for {index.text(wait)}")
            if wait.call is not None and index.knows(wait.call):
                if depth < _DEEPEST:
                    children.append(_call_node(index, wait.call, seen, depth + 1))
                else:
                    index.cut.append(wait.call)
            elif wait.kind in _COLLECTIVES:
                texts += [_absent(index, name) for name in wait.workers]
    return StuckNode(
        "call",
        title,
        worker,
        index.age(key),
        key,
        function,
        state,
        _where(index, key),
        stack if not repeated else (),
        tuple(texts),
        tuple(children),
        repeated,
        any(wait.kind == _SHUTDOWN for wait in index.waits.get(key, ())),
    )


def _absent(index: _Index, name: str) -> str:
    """Say what a worker does that others wait for."""
    view = index.workers.get(name)
    if view is None:
        return f"worker {name!r} does not answer"
    waits = dict.fromkeys(index.text(wait) for wait in index.own_waits.get(name, ()))
    main = view.stacks.get(view.pid, ())
    if waits:
        return f"worker {name!r} itself waits for {' and for '.join(waits)}"
    if main:
        frame = next((frame for frame in reversed(main) if not frame.internal), main[-1])
        return f"the main thread of worker {name!r} is at {frame.file}:{frame.line} in {frame.function}"
    if view.stacks and view.pid not in view.stacks:
        return f"the main thread of worker {name!r} is at an unknown line: it has {view.threads} threads"
    return f"worker {name!r} waits for nothing of telegrad's"


def _state(index: _Index, key: CallKey, worker: str) -> str:
    served = index.served.get(key)
    if served is not None:
        cancelled = f" (cancelled: {served[1].cancelled})" if served[1].cancelled else ""
        return served[1].state + cancelled
    if worker in index.workers:
        return "on its way" if index.made[key].state == "sent" else "not sent"
    return "its worker does not answer"


def _pass_node(view: WorkerView, run: PassView) -> StuckNode:
    age = view.now - run.began
    title = (
        f"backward pass {run.id:#x} of context {run.context:#x} on {view.name!r}, begun by {run.driver!r}: "
        f"{run.state}, islands: {run.islands_run} run, {run.islands_left} left, {age:.1f} s old"
    )
    waits = [f"a gate waits for {gate}" for gate in run.gates]
    if run.waits_for:
        waits.append(f"waits for replies of {', '.join(map(repr, run.waits_for))}")
    stack = next((view.stacks[thread] for thread in run.threads if thread in view.stacks), ())
    return StuckNode("pass", title, view.name, age, state=run.state, stack=stack, waits=tuple(waits))


def _wait_node(view: WorkerView, wait: Wait) -> StuckNode:
    age = view.now - wait.since
    title = f"a thread of worker {view.name!r} waits for {wait.text}, for {age:.1f} s"
    stack = view.stacks.get(wait.thread, ())
    return StuckNode("wait", title, view.name, age, state=wait.kind, stack=stack, expected=wait.kind == _SHUTDOWN)


def count(nodes: Iterable[StuckNode]) -> int:
    """Return how many things trees have."""
    return sum(not node.repeated for node in nodes) + sum(count(node.children) for node in nodes)
