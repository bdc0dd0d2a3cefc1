"""Draws programs from seeds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from telegrad.testing.programs.data import (
    DEVICE_NAMES,
    DEVICES,
    FEATURES,
    LEAVES,
    Body,
    Leaves,
    Pass,
    PostHook,
    Program,
)
from telegrad.testing.programs.ops import OPS, REENTRANT
from telegrad.testing.programs.tensors import CASTS, VIEWS


def draw_program(
    seed: int,
    *,
    most_workers: int = 6,
    features: Mapping[str, float] = FEATURES,
    leaves: Leaves | None = None,
) -> Program:
    """Draw the program of a seed. `features` are the probabilities of features.

    With `leaves` it shares these with other programs that run at the same time: it registers no hooks on them, and
    accumulates gradients in its context.
    """
    draw = random.Random(seed)
    has = frozenset(name for name, weight in features.items() if draw.random() < weight)
    workers = draw.randint(2, most_workers)
    shared = leaves is not None
    if shared and "inputs" in has:
        has -= {"reentrant"}  # a backward inside a pass with inputs= accumulates into .grad, which all share
    if leaves is None:
        leaves = draw_leaves(seed, workers, has)
    bodies = _Bodies(draw, workers, has, leaf_hooks=not shared)
    count = bodies.draw_body(0, 0, 0)
    passes = _draw_passes(draw, workers, count, has)
    if "inputs" in has:
        # Hooks where they matter most: on the inputs, and on roots that may not lead to an input.
        places = sorted({place for one in passes if not one.worker for place in (*one.wanted, *one.roots)})
        first = LEAVES if shared else 0
        bodies.made[0].steps += [
            ("hook", place, draw.getrandbits(48)) for place in places if place >= first and draw.random() < 0.4
        ]
    program = Program(seed, has, workers, leaves, bodies.made, passes, shares_leaves=shared)
    if draw.random() < 0.3 and not shared:
        program.accumulate = "grad"
    return program


def draw_leaves(seed: int, workers: int, has: frozenset[str], *, reachable: int | None = None) -> Leaves:
    """Draw the leaves of all workers, for programs with these features. Hooks call the first `reachable` workers."""
    draw = random.Random(f"leaves of {seed}")
    kinds = ["double"] * 6
    if "subclasses" in has:
        kinds += ["parameter"] * 4
        if draw.random() < 0.1:
            kinds += ["wrapper"]  # cannot be sent
    if "dtypes" in has:
        kinds += ["float"] * 2
    if "grad_dtype" in has:
        kinds += ["float with double gradients"] * 6
    leaves = Leaves(seed, [[draw.choice(kinds) for _ in range(LEAVES)] for _ in range(workers)])
    if DEVICES in has:
        leaves.devices = [[draw.choice(DEVICE_NAMES) for _ in range(LEAVES)] for _ in range(workers)]
    if "post_accumulate" in has:
        for worker in range(workers):
            for leaf in range(LEAVES):
                if draw.random() < 0.4:
                    route = tuple(draw.randrange(reachable or workers) for _ in range(draw.randint(0, 3)))
                    leaves.hooks.append(PostHook(worker, leaf, route, draw.getrandbits(48)))
    return leaves


def _draw_passes(draw: random.Random, workers: int, count: int, has: frozenset[str]) -> list[Pass]:
    """Draw passes over an environment of `count` tensors."""
    number = draw.choice([1, 2, 2, 3, 4]) if "passes" in has else draw.choice([1, 1, 1, 2])
    passes = []
    for index in range(number):
        roots = {draw.randrange(count) for _ in range(draw.choice([1, 1, 1, 2, 3]))}
        # Most roots should reach something, and the last values do.
        if draw.random() < 0.7:
            roots.add(count - 1)
        kind, wanted, worker = "backward", set[int](), 0
        if "inputs" in has and draw.random() < 0.8:
            kind = draw.choice(["inputs", "grad"])
            wanted = {draw.randrange(count) for _ in range(draw.choice([1, 2, 2, 3, 4]))}
            if draw.random() < 0.3:
                wanted.add(draw.randrange(LEAVES))
        retain = index + 1 < number
        if "passes" in has:
            retain = draw.random() < 0.6
            worker = draw.choice([0, 0, draw.randrange(workers)])
        passes.append(Pass(kind, tuple(sorted(roots)), tuple(sorted(wanted)), worker, retain, draw.random() < 0.95))
    return passes


class _Bodies:
    """Draws the bodies of one program."""

    def __init__(self, draw: random.Random, workers: int, has: frozenset[str], *, leaf_hooks: bool) -> None:
        self.made: list[Body] = []
        self._draw = draw
        self._workers = workers
        self._leaf_hooks = leaf_hooks
        self._has = has
        self._budget = draw.randint(3, 30)  # steps in total
        self._special = [name for name in _SPECIAL if name in has]

    def draw_body(self, here: int, arguments: int, depth: int) -> int:
        """Draw a body, and return the final size of its environment."""
        draw, body, size = self._draw, Body(), LEAVES + arguments
        self.made.append(body)
        for place in range(LEAVES if self._leaf_hooks else 0):
            if draw.random() < 0.1:
                body.steps.append(("hook", place, draw.getrandbits(48)))
        for _ in range(draw.randint(1, 8)):
            if self._budget <= 0:
                break
            self._budget -= 1
            if self._special and draw.random() < 0.3:
                step = self._draw_special(draw.choice(self._special), size)
            else:
                step = self._draw_step(size, depth)
            body.steps.append(step)
            size += len(self.made[step[3]].results) if step[0] == "call" else step[0] not in _SILENT
        body.results = [draw.randrange(size) for _ in range(draw.randint(1, 3))]
        return size

    def _draw_step(self, size: int, depth: int) -> tuple[Any, ...]:
        draw = self._draw
        kind = draw.random()
        if kind < 0.4 and depth < 4:
            target = draw.randrange(self._workers)
            sent = tuple(draw.randrange(size) for _ in range(draw.randint(1, 3)))
            inner = len(self.made)
            self.draw_body(target, len(sent), depth + 1)
            return "call", target, sent, inner, self._draw_modes()
        if kind < 0.75:
            return "op", draw.choice(_OPS), draw.randrange(size), draw.randrange(size), draw.random() < 0.3
        if kind < (0.9 if "inputs" in self._has else 0.85) and size > LEAVES:
            return "hook", draw.randrange(LEAVES, size), draw.getrandbits(48)
        if kind < 0.95:
            return "stash", draw.randrange(size)
        return "unstash", draw.randrange(100)

    def _draw_modes(self) -> tuple[str, ...]:
        draw, modes = self._draw, []
        if "grad_modes" in self._has and draw.random() < 0.25:
            modes.append(draw.choice(["no_grad", "no_grad", "enable_grad"]))
        if "autocast" in self._has and draw.random() < 0.5:
            modes.append(draw.choice(["autocast", "autocast", "no autocast"]))
        return tuple(modes)

    def _draw_special(self, feature: str, size: int) -> tuple[Any, ...]:
        draw = self._draw
        place, other = draw.randrange(size), draw.randrange(size)
        match feature:
            case "subclasses":
                return "wrap", draw.choice(_WRAPS), place
            case "dtypes":
                return "cast", draw.choice(list(CASTS)), place
            case "autocast":
                return "matmul", place, other
            case "devices":
                return "move", draw.choice(DEVICE_NAMES), place
            case "reentrant":
                return "run again", draw.choice(list(REENTRANT)), place, draw.randrange(LEAVES)
            case "multi_grad":
                lowest = 0 if self._leaf_hooks or size == LEAVES else LEAVES
                if not self._leaf_hooks and size == LEAVES:
                    return "op", "mul", place, other, False
                places = tuple(draw.randrange(lowest, size) for _ in range(draw.randint(1, 3)))
                return "multi-grad hook", draw.choice(["all", "any"]), places, draw.getrandbits(48)
        return self._draw_views(place, other)

    def _draw_views(self, place: int, other: int) -> tuple[Any, ...]:
        draw = self._draw
        target, direction = draw.randrange(self._workers), draw.choice(["request", "reply"])
        with_history = draw.random() < 0.5
        kinds = [draw.choice(list(VIEWS)) for _ in range(draw.randint(2, 3))]
        if with_history and draw.random() < 0.9:  # the receiver cannot modify others in place: see docs
            kinds = [draw.choice(["head", "tail", "whole", "rows"]) for _ in kinds]
            kinds[draw.randrange(len(kinds))] = "base"
        actions = tuple(
            (draw.choice(["use", "use", "scale", "mul_", "zero_"]), draw.randrange(len(kinds)))
            for _ in range(draw.randint(2, 4))
        )
        return "views", direction, target, place, other, tuple(kinds), with_history, actions


_OPS = list(OPS)
_WRAPS = ["plain subclass", "own reduce", "own wrapper"] * 10 + [
    "wrapper",
    "unlinked wrapper",
]  # telegrad refuses the last two
_SPECIAL = ("subclasses", "dtypes", "autocast", "reentrant", "multi_grad", "views", DEVICES)
_SILENT = ("hook", "stash", "multi-grad hook")  # steps without a result
