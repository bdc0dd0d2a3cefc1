"""Running universes one after the other."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from telegrad.testing.universe.plan import Action, draw_plan
from telegrad.testing.universe.run import run_plan, run_seed
from telegrad.testing.universe.world import Violated


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep pytest from collecting log records: they, and exceptions in them, are objects that stay."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_universe_that_has_ended_is_not_in_memory() -> None:
    def count() -> int:
        return len(gc.get_objects())

    was_enabled = gc.isenabled()
    gc.disable()  # an automatic collection would hide what universes leave
    try:
        for seed in (3, 4, 5):
            run_seed(seed)
        before = count()
        for seed in (3, 4, 5):
            run_seed(seed)
        assert count() - before < 200
    finally:
        if was_enabled:
            gc.enable()


def test_an_unknown_action_fails_and_the_universe_is_not_in_memory() -> None:
    plan = replace(draw_plan(0), faults=(), gathers=(), autograd_program=None)
    with pytest.raises(Violated, match="unknown action"):
        run_plan(replace(plan, programs=(("w0", (Action("dance"),)),)))
