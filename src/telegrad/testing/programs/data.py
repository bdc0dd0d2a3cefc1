"""Programs as plain data: bodies of steps, leaves, passes and features.

A step is a tuple that begins with its kind; `telegrad.testing.programs.running` executes each kind. Tensors are
referred to by their index in the environment of a body, which begins with the worker's leaves and the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LEAVES = 2
"""The number of leaves on each worker."""

FEATURES = {
    "inputs": 0.35,  # grad() and backward(inputs=) for leaves, inner tensors, received tensors and roots
    "passes": 0.35,  # several passes, retained or not, some started on other workers
    "grad_modes": 0.2,  # calls under no_grad
    "subclasses": 0.25,  # Parameters, subclasses with and without their own __reduce_ex__, wrapper subclasses
    "dtypes": 0.25,  # leaves and messages of several dtypes
    "views": 0.2,  # a tensor and views of it in one message, also of two dtypes, with in-place code
    "reentrant": 0.2,  # Functions whose backward runs a backward; checkpoints
    "multi_grad": 0.25,  # register_multi_grad_hook, 'all' and 'any'
    "post_accumulate": 0.3,  # post-accumulate hooks, most of which make calls
    "autocast": 0.2,  # calls under autocast
    "grad_dtype": 0.15,  # leaves that set grad_dtype
}
"""Optional features of programs, beyond calls, shared graphs and tensor hooks, with their probabilities."""

DEVICES = "devices"
"""A feature that is not among those: leaves and values on devices. It needs `telegrad.testing.accelerator`."""
DEVICE_NAMES = ("cpu", "sim:0", "sim:1")


@dataclass
class Body:
    """Steps over an environment of tensors, and the indices of the results."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PostHook:
    """A post-accumulate hook on one leaf, which makes nested calls along a route of workers."""

    worker: int
    leaf: int
    route: tuple[int, ...]
    key: int


@dataclass
class Leaves:
    """The leaves of all workers: the kind of each, and the hooks that they start with."""

    seed: int
    kinds: list[list[str]]
    hooks: list[PostHook] = field(default_factory=list)
    devices: list[list[str]] = field(default_factory=list)
    """The device of each; empty if it is the CPU for all of them."""


@dataclass(frozen=True)
class Pass:
    """One backward pass: `kind` is ``backward``, ``inputs`` (backward with inputs=) or ``grad``."""

    kind: str
    roots: tuple[int, ...]
    wanted: tuple[int, ...] = ()
    worker: int = 0
    retain: bool = False
    allow_unused: bool = True

    def __str__(self) -> str:
        wanted = f" of {list(self.wanted)}" if self.wanted else ""
        notes = [f"on worker {self.worker}"] if self.worker else []
        notes += ["retained"] * self.retain + ["all must be used"] * (not self.allow_unused)
        return f"{self.kind} from {list(self.roots)}{wanted}{' (' + ', '.join(notes) + ')' if notes else ''}"


@dataclass
class Program:
    """A program that runs `bodies[0]` on worker 0, and then its passes."""

    seed: int
    features: frozenset[str]
    workers: int
    leaves: Leaves
    bodies: list[Body]
    passes: list[Pass]
    accumulate: str = "context"
    shares_leaves: bool = False
    """Whether other programs use its leaves at the same time. It then registers no hooks on them."""

    def has(self, kind: str) -> bool:
        """Whether the program contains a step of this kind."""
        return any(step[0] == kind for number in self.reached() for step in self.bodies[number].steps)

    @property
    def counts_only(self) -> bool:
        """Whether post-accumulate hooks log calls without values, because their order depends on the engine."""
        return "reentrant" in self.features

    def reached(self) -> list[int]:
        """Return the bodies that are called, callers first. Shrinking can leave bodies that are not."""
        reached = [0]
        for number in reached:
            reached += [step[3] for step in self.bodies[number].steps if step[0] == "call"]
        return reached

    def has_inputs(self) -> bool:
        """Whether some pass has `inputs`."""
        return any(one.wanted for one in self.passes)

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, {self.workers} workers, features: {', '.join(sorted(self.features)) or 'none'}",
            f"gradients into the {self.accumulate}" if self.accumulate == "context" else "gradients into .grad",
        ]
        kinds = self.leaves.kinds[: self.workers]
        if any(kind != "double" for row in kinds for kind in row):
            lines.append(f"leaves {kinds}")
        if self.leaves.devices:
            lines.append(f"leaves on {self.leaves.devices[: self.workers]}")
        lines += [
            f"worker {hook.worker}, leaf {hook.leaf}: a hook that calls {hook.route}" for hook in self.leaves.hooks
        ]
        self._show(0, 1, lines)
        lines += [f"pass {number}: {one}" for number, one in enumerate(self.passes)]
        return "\n".join(lines)

    def _show(self, number: int, depth: int, lines: list[str]) -> None:
        indent, body = "  " * depth, self.bodies[number]
        for step in body.steps:
            if step[0] == "call":
                _, target, sent, inner, modes = step
                lines.append(
                    f"{indent}call worker {target} with {list(sent)}{' under ' + ', '.join(modes) if modes else ''}"
                )
                self._show(inner, depth + 1, lines)
            else:
                lines.append(indent + " ".join(f"{part:#x}" if _is_key(part) else str(part) for part in step))
        lines.append(f"{indent}returns {body.results}")


def _is_key(part: Any) -> bool:
    return isinstance(part, int) and part >= 1 << 20


def chosen(only: Sequence[str] | None, without: Sequence[str] = ()) -> dict[str, float]:
    """Return feature probabilities: `only` these features, in every program, or all but `without`."""
    for name in (*(only or ()), *without):
        if name not in (*FEATURES, DEVICES):
            raise ValueError(f"there is no feature {name!r}; choose from {', '.join((*FEATURES, DEVICES))}")
    if only is not None:
        return {name: 1.0 for name in (*FEATURES, DEVICES) if name in only}
    return {name: weight for name, weight in FEATURES.items() if name not in without}
