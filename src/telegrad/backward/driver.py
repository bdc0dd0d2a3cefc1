"""Drives a pass on the thread that called backward()."""

from __future__ import annotations

import logging
from threading import get_ident

import torch

from telegrad.backward.effects import carry_out
from telegrad.backward.island_runs import run_island
from telegrad.backward.messaging import ReplyTo
from telegrad.backward.pass_run import PassRun
from telegrad.backward.probe import begin_probe, end_probe
from telegrad.calls.link_reader import Waiter
from telegrad.protocol.backward import PASS_DONE, BeginPass, PassEffect, ResumePass, StartIsland, StartProbe

_log = logging.getLogger("telegrad")


def drive(run: PassRun, deadline: float | None) -> list[torch.Tensor | None]:
    """Run a pass until it is over on every worker. Returns the gradients that its caller asked for."""
    run.driver_thread, run.deadline = get_ident(), deadline
    try:
        _drive(run, deadline)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("pass %#x of context %#x is over on all workers", run.info.number, run.info.context)
        return run.graph.captured
    except BaseException as error:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("pass %#x of context %#x failed: %s", run.info.number, run.info.context, error)
        run.fail(error)  # an interrupt, too: the others must not wait for the rest
        channel = run.outbox.driver_channel
        if channel is not None and run.rules.unacknowledged:
            channel.readers.leave_to_poller()
        raise
    finally:
        run.graph.release()


def _drive(run: PassRun, deadline: float | None) -> None:
    if run.graph.needs is None:
        _begin(run)
    else:
        with run.lock:
            run.rules.probe_first()
        begin_probe(run, "probes for inputs")
    wakeup = Waiter()
    todo, wait = run.todo, run.messaging.agent.oneway.wait
    while True:
        with run.lock:
            effect = todo.popleft() if todo else None
            if effect is None:
                if run.over or run.failure is not None:
                    break
                wakeup.finished = False  # if it is set late, for something that is done, we wake for nothing
                run.wakeup = wakeup
        if type(effect) is StartIsland:
            effects, interrupt = run_island(run, effect)  # as `start_island` does, with one call less
            if len(effects) == 1 and effects[0] is PASS_DONE:
                with run.lock:
                    run.over = True  # as `carry_out` does, which would wake this thread, too
            elif effects:
                carry_out(run, effects)
            if interrupt is not None:
                raise interrupt
        elif effect is not None:
            _carry_out_here(run, effect)
        elif not wait(wakeup, run.outbox.driver_channel, deadline):
            run.fail_late()
    if run.failure is not None:
        raise run.failure


def _begin(run: PassRun) -> None:
    with run.lock:
        run.rules.plan(run.graph.plan(set()))
        effects = run.rules.begin()
        if effects and type(effects[0]) is StartIsland:
            run.todo.extend(effects)
            effects = []
    if effects:
        carry_out(run, effects)


def _carry_out_here(run: PassRun, effect: PassEffect[ReplyTo]) -> None:
    """Carry out an effect that is left to the driver."""
    if isinstance(effect, StartProbe):
        begin_probe(run, "probes")
    elif isinstance(effect, BeginPass):
        _begin(run)
    elif isinstance(effect, ResumePass):
        end_probe(run, effect.workers)
