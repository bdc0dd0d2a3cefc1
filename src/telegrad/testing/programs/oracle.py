"""The oracle: runs a random program in one process with torch's autograd, and compares outcomes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from telegrad.testing.programs.data import Pass, Program
from telegrad.testing.programs.hooks import Key, Log
from telegrad.testing.programs.running import (
    Found,
    Outcome,
    Progress,
    Tensors,
    Worker,
    install_post_hooks,
    make_leaves,
)
from telegrad.testing.programs.siblings import extra_nodes, node_of
from telegrad.testing.programs.tensors import values_of


class OneProcess:
    """All workers in one process. A call is a plain function call."""

    def __init__(self, program: Program, progress: Progress) -> None:
        self._progress = progress
        self.workers: list[Worker] = []
        self._program = program
        self._retained: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the gradients of non-leaf tensors, by id
        self._messages: list[set[Node]] = []
        self._hooked: list[tuple[int, str, set[Node]]] = []  # the hooks: key, mode and nodes
        self.may_run: list[set[int]] = []
        """Per pass, the hooks that telegrad may call although one process does not; see `siblings`."""
        self.may_fail: set[int] = set()
        """Passes in which telegrad may run additional nodes."""
        self.may_free = False
        """Whether telegrad may have freed buffers that one process keeps, for the same reason."""

    def call(self, here: int, target: int, service: str, *args: Any) -> Any:
        return getattr(self.workers[target], f"serve_{service}")(*args)

    def message(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return copies, in any grad mode. A tensor that occurs twice is copied once."""
        made: dict[int, torch.Tensor] = {}
        with torch.enable_grad():
            for tensor in tensors:
                if id(tensor) not in made:
                    made[id(tensor)] = tensor.clone() if tensor.requires_grad else tensor.detach().clone()
        self.sent_together(list(made.values()))
        return [made[id(tensor)] for tensor in tensors]

    def sent_together(self, tensors: Tensors) -> None:
        nodes = {node_of(tensor) for tensor in tensors if tensor.requires_grad}
        if len(nodes) > 1:
            self._messages.append(nodes)

    def hooked(self, key: int, tensors: Tensors, mode: str = "") -> None:
        self._hooked.append((key, mode, {node_of(tensor) for tensor in tensors}))

    def in_thread(self, here: int, action: Callable[[], Any]) -> Any:
        return action()

    def backward(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors | None) -> Found:
        inner = [tensor for tensor in inputs or () if not tensor.is_leaf]
        if self._program.accumulate == "context":
            # In torch, a non-leaf input retains its gradient, and all later passes add to it.
            for tensor in inner:
                tensor.grad = None
        self._note_multi_grad_hooks(roots)
        if inputs is not None:
            self._note_siblings(roots, inputs, retain)
        torch.autograd.backward(roots, grads, retain_graph=retain, inputs=inputs)
        if self._program.accumulate == "grad":
            return [tensor.grad for tensor in inputs or ()]
        for tensor in inner:
            if tensor.grad is not None:
                before = self._retained.get(id(tensor))
                self._retained[id(tensor)] = tensor, tensor.grad if before is None else before[1] + tensor.grad
        return [
            tensor.grad if tensor.is_leaf else self._retained.get(id(tensor), (None, None))[1]
            for tensor in inputs or ()
        ]

    def grad(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors, unused: bool) -> Found:
        self._note_multi_grad_hooks(roots)
        self._note_siblings(roots, inputs, retain)
        # Edges, not tensors: given a tensor subclass, torch would return all results as that subclass.
        outputs, wanted = [list(map(get_gradient_edge, tensors)) for tensors in (roots, inputs)]
        return list(torch.autograd.grad(outputs, wanted, grads, retain_graph=retain, allow_unused=unused))

    def _note_multi_grad_hooks(self, roots: Tensors) -> None:
        """Record multi-grad hooks whose calls cannot be compared.

        Torch calls an 'all' hook twice if one of its tensors is the only root. If a nested backward accumulates into a
        leaf of such a hook between its other gradients, torch forgets how many of them the outer pass expects. An 'any'
        hook may be called with None, for an unused output of a node that runs, and is then not called again.
        """
        begin = {node_of(root) for root in roots}
        nested = self._program.has("run again")
        for key, mode, nodes in self._hooked:
            if mode == "all":
                unlike = not nodes.isdisjoint(begin) or (nested and any(not node.next_functions for node in nodes))
            else:
                unlike = mode == "any" and any(not nodes.isdisjoint(message) for message in self._messages)
            if unlike:
                self.may_run[-1].add(key)

    def _note_siblings(self, roots: Tensors, inputs: Tensors, retain: bool) -> None:
        extra = extra_nodes(roots, inputs, self._messages) if self._messages else set()
        self.may_run[-1].update(key for key, _, nodes in self._hooked if not nodes.isdisjoint(extra))
        if extra:
            self.may_fail.add(len(self.may_run) - 1)
            self.may_free |= not retain
            if self._program.has("run again"):
                self._progress.end_comparison()  # a backward inside such a node accumulates gradients


def run_locally(program: Program) -> Outcome:
    """Run a program in one process."""
    log, progress = Log(), Progress(program)
    group = OneProcess(program, progress)
    made = make_leaves(program.leaves)
    group.workers = [Worker(number, program, made[number], log, group) for number in range(program.workers)]
    handles = [
        handle
        for worker in group.workers
        for handle in install_post_hooks(program.leaves, made, lambda: log, group, program.counts_only, worker.number)
    ]

    def forward() -> None:
        group.workers[0].environment = group.workers[0].run(0, [])

    def one_pass(number: int, one: Pass) -> Found | None:
        log.number = number
        group.may_run.append(set())
        if group.may_free:
            progress.end_comparison()
        return group.workers[one.worker].serve_pass(one)

    progress.run(forward, one_pass, lambda: [[leaf.grad for leaf in worker.leaves] for worker in group.workers])
    for worker in group.workers:
        worker.end()
    for handle in handles:
        handle.remove()
    outcome = progress.outcome(log)
    outcome.may_fail = group.may_fail
    outcome.may_run = {(number, key) for number, keys in enumerate(group.may_run) for key in keys}
    return outcome


# -- comparing ----------------------------------------------------------------------------------------------------


def tolerance(program: Program) -> float:
    """Return the tolerance relative to the largest value: narrow sums depend on their order."""
    narrow = any("float" in kind for row in program.leaves.kinds for kind in row) or program.has("cast")
    if program.has("matmul"):
        return 0.05 if narrow else 1e-6
    return 1e-4 if narrow else 1e-9


def _equal(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    a, b = values_of(a), values_of(b)
    bound = tolerance * max(1.0, b.abs().max().item())
    return bool(((a - b).abs() <= bound).all()) or (bool(b.isnan().any()) and torch.equal(a.isnan(), b.isnan()))


# Errors that torch raises in one process and telegrad does not.
_LIMITS_OF_TORCH = ("A leaf node was passed to _will_engine_execute_node",)

# Documented errors that telegrad raises although one process works.
_REFUSALS = {
    "a received view was changed in place": "is a view and is being modified inplace",
    "a wrapper subclass was sent": "a Wrapper that requires grad cannot be sent in an autograd context",
    "a subclass left its history out": "a Unlinked that requires grad cannot be sent in an autograd context",
}


def refusal(got: Outcome, want: Outcome) -> str:
    """Return the documented reason why a program ended early on one side, or an empty string."""
    if want.error is not None and any(words in str(want.error) for words in _LIMITS_OF_TORCH):
        return "torch cannot do it in one process"
    if want.comparable is not None and len(got.results) >= want.comparable:
        return "siblings of one message were run"
    if got.error is not None and (want.error is None or len(want.results) >= len(got.results)):
        if len(got.results) in want.may_fail:
            return "siblings of one message were run"
        return next((name for name, words in _REFUSALS.items() if words in str(got.error)), "")
    return ""


def differences(got: Outcome, want: Outcome, program: Program, until_error: bool = False) -> list[str]:
    """Describe how two outcomes differ. The list is empty if they are equal.

    With `until_error`, only passes that succeeded on both sides are compared.
    """
    near = tolerance(program)
    if until_error:
        worked = min(len(got.results), len(want.results))
        if want.comparable is not None:
            worked = min(worked, want.comparable)
        pairs = list(zip(got.results[:worked], want.results[:worked], strict=True))
        our_calls, their_calls = (
            {key: side.hooks[key] for key in side.hooks if key[0] < worked} for side in (got, want)
        )
        return [*_different_results(pairs, near), *_different_hooks(our_calls, their_calls, want.may_run, near)]
    if (got.error is None) != (want.error is None) or len(got.results) != len(want.results):
        return [f"{_describe_end(got)}, and one process {_describe_end(want)}"]
    found = _different_results(list(zip(got.results, want.results, strict=True)), near)
    for worker, (ours, other) in enumerate(zip(got.grads, want.grads, strict=True)):
        for leaf, (a, b) in enumerate(zip(ours, other, strict=True)):
            if not _equal(a, b, near):
                found.append(f"worker {worker}, leaf {leaf}: {a} instead of {b}")
    return found + _different_hooks(got.hooks, want.hooks, want.may_run, near)


def _different_results(pairs: Sequence[tuple[Found | None, Found | None]], near: float) -> list[str]:
    found = []
    for number, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None or len(mine) != len(theirs):
            if mine is not theirs:
                found.append(f"pass {number} returned {mine} instead of {theirs}")
            continue
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not _equal(a, b, near):
                found.append(f"pass {number}, wanted tensor {place}: {a} instead of {b}")
    return found


def _different_hooks(
    got: Mapping[Key, Tensors], want: Mapping[Key, Tensors], may_run: Container[Key], near: float
) -> list[str]:
    found = []
    for key in sorted(set(got) | set(want)):
        name = f"in pass {key[0]} hook {key[1]:#x}"
        saw, should = got.get(key, []), want.get(key, [])
        if key in may_run:
            continue
        if len(saw) != len(should):
            found.append(f"{name} was called {len(saw)} times instead of {len(should)}")
        elif not _match(saw, should, near):
            found.append(f"{name} saw {saw} instead of {should}")
    return found


def _match(saw: Tensors, should: Tensors, near: float) -> bool:
    """Whether the values are equal in some order: a nested backward may run before or after the rest."""
    left = list(should)
    for value in saw:
        equal = [index for index, other in enumerate(left) if _equal(value, other, near)]
        if not equal:
            return False
        del left[equal[0]]
    return True


def _describe_end(outcome: Outcome) -> str:
    if outcome.error is None:
        return f"all {len(outcome.results)} passes return"
    first = str(outcome.error).strip().splitlines()[0][:300]
    return f"raises {type(outcome.error).__name__} after {len(outcome.results)} passes ({first})"
