"""Random programs over several workers, and the oracle that they are held against: the same program in one process.

A program is plain data, drawn from a seed: bodies of steps over a list of tensors, and calls in which another worker
runs a body on some of them. `Local` runs it in one process; `Remote` runs it with calls. Both write down the gradients
of all leaves, which of them are None, and every call of a hook with its value.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

LEAVES = 2
"""Leaves that each worker has."""


# -- programs as data -------------------------------------------------------------------------------------------


@dataclass
class Body:
    """Steps over an environment of tensors, and the places of those that are returned."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


@dataclass
class Inputs:
    """What a pass is asked for: gradients of these tensors, by ``grad`` or by ``backward(inputs=)`` into somewhere."""

    kind: str  # "grad", "context" or ".grad"
    places: list[int]
    retain: bool


@dataclass
class Program:
    """One program: it runs on worker 0, and ends in one or two passes from these roots."""

    workers: int
    body: Body
    passes: list[list[int]]
    seed: int
    inputs: list[Inputs | None]
    """Of each pass; None: it is for all leaves."""
    single: bool
    """Each message has one tensor. Several are the outputs of one node, so that hooks may run more often."""

    multi: bool = False
    """It has multi-grad hooks."""

    @property
    def hooks_are_equal(self) -> bool:
        """Whether hooks run, and passes fail, exactly as in one process."""
        return self.single or all(asked is None for asked in self.inputs)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.workers} workers, passes from {self.passes}, inputs {self.inputs}"]
        _show(self.body, 1, lines)
        return "\n".join(lines)


def _show(body: Body, depth: int, lines: list[str]) -> None:
    for step in body.steps:
        if step[0] == "call":
            lines.append(f"{'  ' * depth}call worker {step[1]} with {step[2]}")
            _show(step[3], depth + 1, lines)
        else:
            lines.append("  " * depth + " ".join(map(str, step)))
    lines.append(f"{'  ' * depth}returns {body.results}")


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "user": lambda x, y: _user_mul(x, y),
    "sin": lambda x, y: (x * 0.5).sin() * y,
    "tanh": lambda x, y: x - y.tanh(),
    "first": lambda x, y: torch.cat([x, y]).view(2, 3).unbind(0)[0],
    "second": lambda x, y: torch.cat([x, y]).view(2, 3).unbind(0)[1],
    "detach": lambda x, y: x.detach() + y,
}


class UserMul(torch.autograd.Function):
    """A product that a user wrote: it turns missing gradients into zeros, as torch's default is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def _user_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = UserMul.apply(x, y)  # type: ignore[no-untyped-call]  # torch has no types for it
    return product


def draw_program(seed: int, *, most_workers: int = 6, leaf_hooks: bool = True) -> Program:
    """The program of that seed."""
    draw = random.Random(seed)
    extra = random.Random(f"inputs of {seed}")
    single = extra.random() < 0.4
    workers = draw.randint(2, most_workers)
    budget = [draw.randint(3, 30)]  # steps in all
    multi = extra if single and extra.random() < 0.5 else None
    body = _draw_body(draw, workers, 0, 0, budget, leaf_hooks, 1 if single else 3, multi, depth=0)
    count = _size(body, 0)
    passes = [
        sorted({draw.randrange(count) for _ in range(draw.choice([1, 1, 1, 2, 3]))})
        for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    # The roots should reach something, most of the time: the last values do.
    if draw.random() < 0.7:
        passes[0] = sorted({*passes[0], count - 1})
    inputs = [_draw_inputs(extra, count) if single or extra.random() < 0.3 else None for _ in passes]
    for asked in inputs:
        for place in asked.places if asked is not None else ():
            if place >= LEAVES and extra.random() < 0.6:
                body.steps.append(("hook", place, extra.getrandbits(48)))
    return Program(workers, body, passes, seed, inputs, single, multi is not None)


def _draw_inputs(draw: random.Random, count: int) -> Inputs | None:
    kind = draw.choice(["grad", "grad", "context", ".grad", ""])
    places = [draw.randrange(LEAVES if draw.random() < 0.3 else count) for _ in range(draw.choice([1, 2, 3, 4]))]
    return Inputs(kind, sorted(set(places)), draw.random() < 0.5) if kind else None


def _size(body: Body, arguments: int) -> int:
    """How long the environment of a body is at its end."""
    size = LEAVES + arguments
    for step in body.steps:
        size += len(step[3].results) if step[0] == "call" else step[0] in ("op", "unstash")
    return size


def _draw_body(
    draw: random.Random,
    workers: int,
    here: int,
    arguments: int,
    budget: list[int],
    leaf_hooks: bool,
    most: int,
    multi: random.Random | None,
    depth: int,
) -> Body:
    body, size = Body(), LEAVES + arguments
    for place in range(LEAVES if leaf_hooks else 0):
        if draw.random() < 0.1:
            body.steps.append(("hook", place, draw.getrandbits(48)))
    for _ in range(draw.randint(1, 8)):
        if budget[0] <= 0:
            break
        budget[0] -= 1
        kind = draw.random()
        if kind < 0.4 and depth < 4:
            there = draw.randrange(workers)
            sent = [draw.randrange(size) for _ in range(draw.randint(1, most))]
            inner = _draw_body(draw, workers, there, len(sent), budget, leaf_hooks, most, multi, depth + 1)
            body.steps.append(("call", there, sent, inner))
            size += len(inner.results)
        elif kind < 0.75:
            op = draw.choice(list(OPS))
            body.steps.append(("op", op, draw.randrange(size), draw.randrange(size), draw.random() < 0.3))
            size += 1
        elif kind < 0.85 and size > LEAVES:
            body.steps.append(("hook", draw.randrange(LEAVES, size), draw.getrandbits(48)))
        elif kind < 0.93:
            body.steps.append(("stash", draw.randrange(size)))
        else:
            body.steps.append(("unstash", draw.randrange(100)))
            size += 1
    body.results = [draw.randrange(size) for _ in range(draw.randint(1, most))]
    if multi is not None and size > LEAVES and multi.random() < 0.4:
        places = [multi.randrange(LEAVES, size) for _ in range(multi.randint(1, 3))]
        body.steps.append(("multi", places, multi.choice(["all", "all", "any"]), multi.getrandbits(48)))
    return body


# -- running them -------------------------------------------------------------------------------------------------


class Log:
    """Calls of hooks, with their values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects calls
        self.calls: dict[int, list[torch.Tensor]] = defaultdict(list)

    def hook(self, key: int) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        """A hook that notes what it sees, and changes it."""

        def run(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:
                # Torch calls hooks of a node's unused outputs with None; a message's tensors are one node's outputs.
                return None
            with self._lock:
                self.calls[key].append(grad.detach().clone())
            return grad.clamp(-2.0, 2.0)

        return run

    def on_all(self, tensors: Sequence[torch.Tensor], mode: Any, key: int) -> Any:
        """A multi-grad hook that notes what it sees; with "any", which gradient is the first is up to the network."""

        def run(grads: Any) -> None:
            nothing = torch.zeros(3, dtype=torch.double)
            seen = [nothing]
            if mode == "all":
                seen = [nothing if grad is None else grad.detach().clone() for grad in grads]
            with self._lock:
                self.calls[key] += seen

        return register_multi_grad_hook(tensors, run, mode=mode)


def make_leaves(seed: int, workers: int) -> list[list[torch.Tensor]]:
    """The leaves of every worker, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(3, dtype=torch.double, generator=generator).requires_grad_() for _ in range(LEAVES)]
        for _ in range(workers)
    ]


class Worker:
    """What one worker has while a program runs."""

    def __init__(self, leaves: Sequence[torch.Tensor], log: Log) -> None:
        self.leaves = leaves
        self.log = log
        self.stash: list[torch.Tensor] = []
        self.handles: list[Any] = []

    def run(
        self,
        body: Body,
        arguments: Sequence[torch.Tensor],
        call: Callable[[int, Sequence[torch.Tensor], Body], Sequence[torch.Tensor]],
        in_thread: Callable[[Callable[[], Any]], Any],
    ) -> list[torch.Tensor]:
        """Run a body here; `call` runs one elsewhere. Returns the whole environment."""
        environment = [*self.leaves, *arguments]
        for step in body.steps:
            match step:
                case "op", name, left, right, elsewhere:
                    x, y = environment[left], environment[right]
                    action = partial(OPS[name], x, y)
                    environment.append(in_thread(action) if elsewhere else action())
                case "call", there, sent, inner:
                    environment += call(there, [environment[place] for place in sent], inner)
                case "hook", place, key:
                    if environment[place].requires_grad:
                        self.handles.append(environment[place].register_hook(self.log.hook(key)))
                case "multi", places, mode, key:
                    tensors = [environment[place] for place in places if environment[place].grad_fn is not None]
                    if tensors:  # those of leaves cannot be used with torch.autograd.grad, the oracle
                        self.handles.append(self.log.on_all(tensors, mode, key))
                case "stash", place:
                    self.stash.append(environment[place])
                case "unstash", number:
                    environment.append(self.stash[number % len(self.stash)] if self.stash else environment[0])
        return environment

    def end(self) -> None:
        """Forget what belongs to the program."""
        for handle in self.handles:
            handle.remove()
        self.stash.clear()


@dataclass
class Outcome:
    """What a run of a program left behind."""

    grads: list[list[torch.Tensor | None]]
    hooks: dict[int, list[torch.Tensor]]
    probes: int = 0
    wanted: list[torch.Tensor | None] = field(default_factory=list)
    """The gradients of inputs."""
    failed: bool = False
    """A pass raised: it needed what an earlier one had freed. The passes after it are left out."""


def run_locally(program: Program) -> Outcome:
    """The oracle: one process, torch's own autograd."""
    log = Log()
    leaves = make_leaves(program.seed, program.workers)
    workers = [Worker(leaves[number], log) for number in range(program.workers)]

    def call(there: int, sent: Sequence[torch.Tensor], body: Body) -> list[torch.Tensor]:
        worker = workers[there]
        environment = worker.run(body, _through_a_message(sent), call, lambda action: action())
        return _through_a_message([environment[place] for place in body.results])

    environment = workers[0].run(program.body, [], call, lambda action: action())
    grads: list[list[torch.Tensor | None]] = [[None] * LEAVES for _ in workers]
    flat = [leaf for worker in leaves for leaf in worker]
    outcome = Outcome(grads, log.calls)
    for number, places in enumerate(program.passes):
        roots = roots_of(environment, places, apart=program.multi)
        asked = program.inputs[number]
        inputs = inputs_of(environment, asked)
        if not roots or inputs == []:
            continue
        ones = [torch.ones_like(root) for root in roots]
        try:
            if asked is not None and inputs is not None:
                outcome.wanted += _wanted_locally(asked, inputs, roots, ones)
                continue
            retain = number + 1 < len(program.passes)
            found = torch.autograd.grad(roots, flat, ones, retain_graph=retain, allow_unused=True)
        except RuntimeError:
            outcome.failed = True
            break
        for place, grad in enumerate(found):
            owner, leaf = divmod(place, LEAVES)
            there = grads[owner][leaf]
            grads[owner][leaf] = grad if there is None else there if grad is None else there + grad
    for worker in workers:
        worker.end()
    return outcome


def _wanted_locally(
    asked: Inputs, inputs: list[torch.Tensor], roots: list[torch.Tensor], ones: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    if asked.kind == "grad":
        return list(torch.autograd.grad(roots, inputs, ones, retain_graph=asked.retain, allow_unused=True))
    torch.autograd.backward(roots, ones, retain_graph=asked.retain, inputs=inputs)
    return take_grads(inputs)


def take_grads(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What they have in ``.grad``, which is None afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of a tensor that is no leaf and got none
        grads = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
    return grads


def _through_a_message(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a message does to tensors: new ones, the same one twice still being one."""
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone() if tensor.requires_grad else tensor.detach().clone()
    return [made[id(tensor)] for tensor in tensors]


def roots_of(environment: Sequence[torch.Tensor], places: Sequence[int], *, apart: bool = False) -> list[torch.Tensor]:
    """The roots of a pass: those that can be differentiated. `apart`: no hook is on them.

    Torch does not count the root of a pass among the tensors of a multi-grad hook, if it is the only one.
    """
    there = [environment[place] for place in places if environment[place].requires_grad]
    return [root * 1 for root in there] if apart else there


def inputs_of(environment: Sequence[torch.Tensor], asked: Inputs | None) -> list[torch.Tensor] | None:
    """The inputs of a pass: those that can have a gradient, each once; None: it has none."""
    if asked is None:
        return None
    return list({id(tensor): tensor for tensor in roots_of(environment, asked.places)}.values())


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def differences(got: Outcome, want: Outcome, *, hooks: bool = True) -> list[str]:
    """How two outcomes differ, for people; nothing if they are equal."""
    found = []
    if hooks and got.failed != want.failed:
        return [f"a pass {'raised' if got.failed else 'did not raise'}"]
    if got.failed or want.failed:
        return []
    for number, (found_here, expected) in enumerate(zip(got.wanted, want.wanted, strict=True)):
        if not _equal(found_here, expected):
            found.append(f"input {number}: {found_here} instead of {expected}")
    for worker, (mine, theirs) in enumerate(zip(got.grads, want.grads, strict=True)):
        for leaf, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not _equal(a, b):
                found.append(f"worker {worker}, leaf {leaf}: {a} instead of {b}")
    for key in sorted(set(got.hooks) | set(want.hooks)) if hooks else ():
        saw, should = got.hooks.get(key, []), want.hooks.get(key, [])
        if len(saw) != len(should):
            found.append(f"hook {key:#x} was called {len(saw)} times instead of {len(should)}")
        elif not all(map(_equal, saw, should)):
            found.append(f"hook {key:#x} saw {saw} instead of {should}")
    return found
