"""Shrinks a failing program while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from telegrad.testing.programs.data import Body, Program

T = TypeVar("T")


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 400) -> Program:
    """Return the smallest program found in at most `most` tries for which `fails` still holds."""
    tries, again = 0, True
    while again:
        again = False
        for smaller in _smaller(program):
            tries += 1
            if tries > most:
                return program
            if fails(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing removed, the largest reductions first."""
    for number in range(len(program.passes)):
        if len(program.passes) > 1:
            yield replace(program, passes=_without(program.passes, number))
    reached = program.reached()
    for number in reached:
        for place, step in enumerate(program.bodies[number].steps):
            if step[0] == "call":
                yield _with_step(program, number, place, [("again", len(program.bodies[step[3]].results))])
    for number in reached:
        for place, step in reversed(list(enumerate(program.bodies[number].steps))):
            if step[0] in ("hook", "stash", "multi-grad hook"):
                yield _with_step(program, number, place, [])
            elif step[0] not in ("again", "call"):
                yield _with_step(program, number, place, [("again", 1)])
            elif step[0] == "call" and step[4]:
                yield _with_step(program, number, place, [(*step[:4], ())])
    for number, one in enumerate(program.passes):
        for name in ("roots", "wanted"):
            places = getattr(one, name)
            for index in range(len(places) if len(places) > 1 else 0):
                rest = (*places[:index], *places[index + 1 :])
                less = replace(one, roots=rest) if name == "roots" else replace(one, wanted=rest)
                yield replace(program, passes=[*program.passes[:number], less, *program.passes[number + 1 :]])
    leaves = program.leaves
    if program.shares_leaves:
        return
    for index in range(len(leaves.hooks)):
        yield replace(program, leaves=replace(leaves, hooks=_without(leaves.hooks, index)))
    for worker, row in enumerate(leaves.kinds):
        for index, kind in enumerate(row):
            if kind != "double":
                kinds = [list(each) for each in leaves.kinds]
                kinds[worker][index] = "double"
                yield replace(program, leaves=replace(leaves, kinds=kinds))
    if program.accumulate == "grad":
        yield replace(program, accumulate="context")


def _without(values: list[T], index: int) -> list[T]:
    return [*values[:index], *values[index + 1 :]]


def _with_step(program: Program, number: int, place: int, steps: list[tuple[object, ...]]) -> Program:
    body = program.bodies[number]
    made = Body([*body.steps[:place], *steps, *body.steps[place + 1 :]], body.results)
    return replace(program, bodies=[*program.bodies[:number], made, *program.bodies[number + 1 :]])
