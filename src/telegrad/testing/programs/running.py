"""Executes random programs: the steps of bodies, and passes. The oracle and real workers run the same code.

They differ in `Group`: a call is a plain function call in the oracle, and a message between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from telegrad.testing.programs.data import LEAVES, Leaves, Pass, Program
from telegrad.testing.programs.hooks import Key, Log, multi_grad_hook, post_accumulate_hook, tensor_hook
from telegrad.testing.programs.ops import compute, entered, matmul, run_again_in_backward
from telegrad.testing.programs.tensors import CASTS, WRAPS, Wrapper, make_views, normal, use_views

Tensors = Sequence[torch.Tensor]
Found = list[torch.Tensor | None]


class Group(Protocol):
    """How a worker calls others, and runs passes."""

    def call(self, here: int, target: int, service: str, *args: Any) -> Any:
        """Run a service on another worker: the method `serve_<service>` of `Worker`."""

    def message(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the tensors as they arrive in a message. The oracle copies them here; on workers the message does."""

    def sent_together(self, tensors: Tensors) -> None:
        """Record that these tensors travel in one message."""

    def hooked(self, key: int, tensors: Tensors, mode: str = "") -> None:
        """Record that a hook was registered on these tensors. `mode` is that of a multi-grad hook."""

    def in_thread(self, here: int, action: Callable[[], Any]) -> Any:
        """Run `action` in another thread, and return its result."""

    def backward(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors | None) -> Found:
        """Run a pass, and return the gradients of `inputs` so far."""

    def grad(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors, unused: bool) -> Found:
        """Return the gradients of `inputs`."""


def make_leaves(leaves: Leaves) -> list[list[torch.Tensor]]:
    """Create the leaves of every worker from their seed."""
    generator = torch.Generator().manual_seed(leaves.seed)
    devices = leaves.devices or [["cpu"] * len(row) for row in leaves.kinds]
    return [
        [
            _make_leaf(kind, torch.randn(3, generator=generator).to(device))
            for kind, device in zip(row, places, strict=True)
        ]
        for row, places in zip(leaves.kinds, devices, strict=False)
    ]


def _make_leaf(kind: str, values: torch.Tensor) -> torch.Tensor:
    match kind:
        case "parameter":
            return torch.nn.Parameter(values.double())
        case "wrapper":
            return Wrapper(values.double()).requires_grad_()
        case "float":
            return values.requires_grad_()
        case "float with double gradients":
            values.requires_grad_()
            values.grad_dtype = torch.double
            return values
    return values.double().requires_grad_()


def install_post_hooks(
    leaves: Leaves, made: list[list[torch.Tensor]], log: Callable[[], Log], group: Group, counted_only: bool, owner: int
) -> list[Any]:
    """Register the post-accumulate hooks on a worker's leaves, and return their handles."""
    handles = []
    for hook in leaves.hooks:
        if hook.worker == owner:
            relay = partial(_relay, group, hook.worker, hook.route)
            run = post_accumulate_hook(log, hook.key, relay, counted_only)
            register: Any = made[hook.worker][hook.leaf].register_post_accumulate_grad_hook  # untyped in torch
            handles.append(register(run))
    return handles


def _relay(group: Group, here: int, route: Sequence[int], value: torch.Tensor) -> Any:
    return group.call(here, route[0], "relay", tuple(route[1:]), value) if route else value


class Worker:
    """The state of one worker while a program runs."""

    def __init__(self, number: int, program: Program, leaves: Tensors, log: Log, group: Group) -> None:
        self.number = number
        self.program = program
        self.leaves = leaves
        self.log = log
        self.group = group
        self.stash: list[torch.Tensor] = []
        self.environment: list[torch.Tensor] = []
        """The tensors that passes of this worker start from. If empty, its leaves and its stash."""
        self.handles: list[Any] = []

    # -- services -------------------------------------------------------------------------------------------------

    def serve_body(self, body: int, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Run a body, and return its results."""
        environment = self.run(body, arguments)
        return [environment[place] for place in self.program.bodies[body].results]

    def serve_relay(self, route: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
        """Double a value and pass it along the route, for a hook."""
        result: torch.Tensor = _relay(self.group, self.number, route, value * 2)
        return result

    def serve_use_views(
        self, actions: Sequence[tuple[str, int]], x: torch.Tensor, *views: torch.Tensor
    ) -> torch.Tensor:
        """Compute with views that arrived in one message."""
        return use_views(x, views, actions)

    def serve_make_views(self, kinds: Sequence[str], with_history: bool, x: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor and views of it."""
        return make_views(x, kinds, with_history)

    def serve_pass(self, one: Pass) -> Found | None:
        """Run a pass that starts on this worker. Returns None if there is nothing to differentiate."""
        environment = self.environment or [*self.leaves, *self.stash]
        roots = _differentiable(environment, one.roots)
        wanted = _differentiable(environment, one.wanted)
        if not roots or (one.wanted and not wanted):
            return None
        grads = [torch.ones_like(root) for root in roots]
        if one.kind == "grad":
            return self.group.grad(self.number, roots, grads, one.retain, wanted, one.allow_unused)
        return self.group.backward(self.number, roots, grads, one.retain, wanted if one.kind == "inputs" else None)

    # -- steps ----------------------------------------------------------------------------------------------------

    def run(self, body: int, arguments: Tensors) -> list[torch.Tensor]:
        """Run a body here, and return its whole environment."""
        environment = [*self.leaves, *arguments]
        for step in self.program.bodies[body].steps:
            self._step(step, environment)
        return environment

    def _step(self, step: tuple[Any, ...], environment: list[torch.Tensor]) -> None:
        group, here = self.group, self.number
        match step:
            case "op", name, left, right, elsewhere:
                action = partial(compute, name, environment[left], environment[right])
                # Modes are thread-local: the operation would not be in them in another thread.
                elsewhere = elsewhere and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
                environment.append(group.in_thread(here, action) if elsewhere else action())
            case "call", target, sent, inner, modes:
                arguments = group.message([environment[place] for place in sent])
                with entered(modes):
                    results = group.call(here, target, "body", inner, *arguments)
                environment += group.message(results)
            case "hook", place, key:
                if environment[place].requires_grad and self._may_hook(environment[place]):
                    self.handles.append(environment[place].register_hook(tensor_hook(self.log, key)))
                    group.hooked(key, [environment[place]])
            case "stash", place:
                self.stash.append(environment[place])
            case "unstash", number:
                environment.append(self.stash[number % len(self.stash)] if self.stash else environment[0])
            case "again", count:  # a placeholder that shrinking leaves for a step
                environment += [environment[0]] * count
            case "cast", name, place:
                environment.append(normal(environment[place]).to(CASTS[name]))
            case "move", device, place:
                environment.append(normal(environment[place]).to(device))
            case "wrap", name, place:
                environment.append(WRAPS[name](normal(environment[place])))
            case "matmul", left, right:
                environment.append(matmul(environment[left], environment[right]))
            case "run again", kind, place, leaf:
                environment.append(run_again_in_backward(kind, environment[place], self.leaves[leaf]))
            case "multi-grad hook", mode, places, key:
                tensors = [tensor for tensor in _differentiable(environment, places) if self._may_hook(tensor)]
                if tensors:
                    self.handles.append(multi_grad_hook(self.log, key, tensors, mode))
                    for index in range(len(tensors)):  # what is called for one shows in what is noted of all
                        group.hooked(key + index, tensors, mode)
            case "views", direction, target, place, other, kinds, with_history, actions:
                # One process hands the views themselves over: nobody uses them afterwards.
                x = environment[other]
                if direction == "request":
                    views = make_views(environment[place], kinds, with_history)
                    sent = group.message([normal(x)])
                    group.sent_together([*sent, *views])
                    environment += group.message([group.call(here, target, "use_views", actions, *sent, *views)])
                else:
                    sent = group.message([normal(environment[place])])
                    views = group.call(here, target, "make_views", kinds, with_history, *sent)
                    group.sent_together(views)
                    environment.append(use_views(x, views, actions))
            case _:
                raise AssertionError(f"unknown step {step}")

    def _may_hook(self, tensor: torch.Tensor) -> bool:
        return not (self.program.shares_leaves and tensor.is_leaf)

    def end(self) -> None:
        """Forget what belongs to the program."""
        for handle in self.handles:
            handle.remove()
        self.stash.clear()
        self.environment.clear()


def _differentiable(environment: Tensors, places: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors at these indices that require grad, each once."""
    found = [environment[place % len(environment)] for place in places]
    return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())


# -- outcomes -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of running a program."""

    grads: list[Found]
    """The gradients of each worker's leaves, after the last pass that succeeded."""
    results: list[Found | None]
    """For each pass that succeeded: the gradients of its inputs, or None if there was nothing to differentiate."""
    hooks: dict[Key, list[torch.Tensor]]
    error: BaseException | None = None
    """The error of the forward or a pass, which ended the program."""
    probes: int = 0
    may_run: set[Key] = field(default_factory=set)
    """Set by the oracle: hooks that telegrad may or may not call."""
    may_fail: set[int] = field(default_factory=set)
    """Set by the oracle: passes in which telegrad may run additional nodes, which may raise."""
    comparable: int | None = None
    """Set by the oracle: how many passes must be equal, or None for all."""


@dataclass
class Progress:
    """Runs a program pass by pass, and collects the results."""

    program: Program
    grads: list[Found] = field(default_factory=list)
    results: list[Found | None] = field(default_factory=list)
    error: BaseException | None = None
    comparable: int | None = None

    def run(
        self,
        forward: Callable[[], None],
        one_pass: Callable[[int, Pass], Found | None],
        look: Callable[[], list[Found]],
    ) -> None:
        """Run forward and passes until one raises. `look` returns the gradients of all leaves."""
        self.grads = [[None] * LEAVES for _ in range(self.program.workers)]
        try:
            forward()
            for number, one in enumerate(self.program.passes):
                found = one_pass(number, one)
                self.results.append(None if found is None else [_copy(grad) for grad in found])
                self.grads = [[_copy(grad) for grad in row] for row in look()]
        except RuntimeError as error:  # from torch, a worker or telegrad
            self.error = error

    def end_comparison(self) -> None:
        """Exclude the following passes from the comparison: their results depend on the engine."""
        if self.comparable is None:
            self.comparable = len(self.results)

    def outcome(self, log: Log) -> Outcome:
        """Return the outcome, without the hook calls of a failed pass."""
        failed = len(self.results) if self.error is not None else None
        hooks = log.without_pass(failed)
        return Outcome(self.grads, self.results, hooks, self.error, comparable=self.comparable)


def left_in_context(program: Program, tensor: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor | None:
    """Return the whole gradient of a tensor, given the part that is in the context.

    A nested backward inside a pass with inputs= accumulates into ``.grad``, as in one process. Nothing else does.
    """
    if not (tensor.is_leaf and program.has_inputs() and program.has("run again")) or tensor.grad is None:
        return found
    return tensor.grad if found is None else tensor.grad + found


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
