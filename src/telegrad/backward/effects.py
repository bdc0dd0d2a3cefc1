"""Carries out what the rules of a pass ask for.

Whoever caused an effect carries it out: a worker thread that read a gradient runs the island that it completes. Only
where the pass began, islands without gates wait for the thread inside backward(), so that the user's profiler, anomaly
mode and autocast see them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from telegrad.backward.island_runs import run_island
from telegrad.backward.messaging import ReplyTo
from telegrad.backward.pass_run import PassRun
from telegrad.errors import ResourceExhausted, TelegradError
from telegrad.protocol.backward import Acknowledge, PassDone, PassEffect, PassStuck, StartIsland


def carry_out(run: PassRun, effects: Iterable[PassEffect[ReplyTo]]) -> None:
    """Carry out effects of the rules, and the effects of islands that this runs."""
    while True:
        run_here: StartIsland | None = None
        for effect in effects:
            if isinstance(effect, StartIsland):
                if effect.waiting:
                    _start_gated(run, effect)
                elif run.begun_here:
                    # Even on the driver's own thread: it may have read messages of other passes with those of this one.
                    _leave_to_driver(run, effect)
                elif run_here is None:
                    run_here = effect
                else:
                    run.messaging.agent.executor.submit(partial(start_island, run, effect))
            elif isinstance(effect, Acknowledge):
                run.reply(effect.ticket)
            elif isinstance(effect, PassDone):
                _finish(run)
            elif isinstance(effect, PassStuck):
                names = ", ".join(map(repr, map(run.messaging.name_of, effect.workers)))
                run.fail(
                    TelegradError(
                        f"the backward pass stopped, but worker {names} still waits for gradients: this is a bug "
                        "in telegrad, please report it with the program"
                    )
                )
            else:
                _leave_to_driver(run, effect)
        if run_here is None:
            return
        effects, interrupt = run_island(run, run_here)
        if interrupt is not None:
            carry_out(run, effects)
            raise interrupt


def start_island(run: PassRun, start: StartIsland) -> None:
    """Run an island, and carry out the effects of its end."""
    effects, interrupt = run_island(run, start)
    if effects:
        carry_out(run, effects)
    if interrupt is not None:
        raise interrupt


def _start_gated(run: PassRun, start: StartIsland) -> None:
    """Run an island with gates on a thread that may wait."""
    try:
        run.messaging.agent.executor.threads.start("gated island", partial(start_island, run, start))
    except ResourceExhausted as error:
        run.fail(error)
        start_island(run, start)  # runs nothing in a pass that has failed, but notes the island's end


def _leave_to_driver(run: PassRun, effect: PassEffect[ReplyTo]) -> None:
    with run.lock:
        run.todo.append(effect)
        wakeup = run.wakeup
    if wakeup is not None:
        wakeup.set()


def _finish(run: PassRun) -> None:
    with run.lock:
        run.over = True
        wakeup = run.wakeup
    if wakeup is not None:
        wakeup.set()
