"""Runs one island of a pass: with the pass, its context and its agent as the current ones, and with its end noted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from telegrad import events
from telegrad.backward.contexts import current
from telegrad.backward.failure import PassAborted
from telegrad.backward.islands import Island
from telegrad.backward.messaging import ReplyTo, pack_reports
from telegrad.backward.outgoing import send_gradients
from telegrad.backward.pass_run import GradientMessage, PassRun, running
from telegrad.calls.call import current_agent, current_served
from telegrad.protocol.backward import ROOT, Acknowledge, PassEffect, StartIsland
from telegrad.torch_private import engine_uses_threads, use_engine_threads
from telegrad.wire.messages import PROFILED, PiggybackedResp
from telegrad.wire.staging import wait_for


def run_island(run: PassRun, start: StartIsland) -> tuple[list[PassEffect[ReplyTo]], BaseException | None]:
    """Run an island. Returns the effects of its end, and an interrupt to raise once they have been carried out."""
    engine = run.engine
    island = run.graph.islands[start.island]
    interrupt: BaseException | None = None
    node: Any
    thread, began = get_ident(), run.messaging.now()
    run.threads[thread] = None
    try:
        done = island.direct and run.failure is None and engine.accumulate_directly(island)
    except Exception as error:  # noqa: BLE001 - as below
        run.fail(error)
        done = True
    if done:
        return _end(run, island, began, "leaves only"), None
    if island.last and not start.waiting and not run.info.create_graph:
        run.outbox.held[island.last] = None
    # All nodes run on this thread, those of devices, too. Torch's own thread for a device serves everything in the
    # process: a gate, a hook that makes a call or a pass inside this one would wait on it for something that may need
    # this device, and so for itself.
    threads = engine_uses_threads()
    use_engine_threads(False)
    pass_token, context_token = running.set(run), current.set(run.context)
    # User code that runs in here, such as a hook, makes its calls from this worker.
    agent_token, served_token = current_agent.set(run.messaging.agent), current_served.set(None)
    try:
        if run.failure is None:
            run_engine, profiler = engine.run, run.messaging.pass_profiler
            if run.info.modes & PROFILED and profiler is not None:
                run_engine = profiler.recorded(run, run_engine)
            captured = run_engine(island, start.waiting, run.wait_for_gradient, run.wait_for_slot)
            on_devices = bool(island.wanted)
            for node in island.leaves:
                on_devices = on_devices or not node.variable.is_cpu
            if on_devices:
                _wait_for_devices(island, captured)
            if captured and (island.leaves or island.wanted) and run.failure is None:
                engine.keep(island, captured)  # else nobody asks for them, and another pass may have begun
            del captured
    except PassAborted:
        run.messaging.count("islands aborted")
    except BaseException as error:  # noqa: BLE001 - whatever user code raises fails the pass
        run.fail(error)
        interrupt = None if isinstance(error, Exception) else error
    finally:
        try:
            inner = run.inner.pop(thread, None) if run.inner else None
            if inner is not None:
                inner.end()
        except Exception as error:  # noqa: BLE001 - as above
            run.fail(error)
        finally:
            use_engine_threads(threads)
            running.reset(pass_token)
            current.reset(context_token)
            current_agent.reset(agent_token)
            current_served.reset(served_token)
    what = "with gates" if start.waiting else "from the roots" if ROOT in island.entries else ""
    effects = _end(run, island, began, what)
    if interrupt is not None and thread not in (run.driver_thread, threading.main_thread().ident):
        interrupt = None  # only the user's own thread is interrupted, though it may run an island of another pass
    return effects, interrupt


def _wait_for_devices(island: Island, captured: Sequence[torch.Tensor | None]) -> None:
    """Wait until the gradients that an island leaves here are computed: other threads read them on their own streams.

    The engine has made the current streams of this thread wait for those of its nodes.
    """
    node: Any
    devices = {grad.device for grad in captured if grad is not None}
    for node in island.leaves:
        devices.add(node.variable.device)
    wait_for(devices)


def _end(run: PassRun, island: Island, began: float, what: str) -> list[PassEffect[ReplyTo]]:
    """Note that an island has ended, and send what waited for that. Returns the effects."""
    thread, ended, ring = get_ident(), run.messaging.now(), run.events
    run.threads.pop(thread, None)
    run.touched = ended
    run.islands_run += 1
    for entry in island.entries:
        fed = run.graph.fed.get(entry)  # type: ignore[call-overload]  # entries but ROOT are message ids
        if fed is not None:
            fed.forget()
    message = run.outbox.held.pop(island.last, None) if island.last else None
    reply: PiggybackedResp | None = None
    with run.lock:
        effects = run.rules.island_finished()
        if message is not None and len(effects) == 1 and run.failure is None:
            reply = _reply_with(run, message, effects[0])
    if message is not None and send_gradients(run, message, reply) and reply is not None:
        effects = []  # the reply left with the gradients
    if ring.on:  # as `EventRing.record` does. At the end: others wait for the gradients, and nobody for this
        n, kind, context, append = next(ring.numbers), events.ISLAND, run.context.id, ring.append
        append((n, kind, began, ended, 0, "", what, context, run.info.number, None, "", 0, 0, thread))
    return effects


def _reply_with(run: PassRun, message: GradientMessage, effect: PassEffect[ReplyTo]) -> PiggybackedResp | None:
    """Return a reply that can be sent with gradients, if it goes to the same worker. Called with the lock held."""
    if not isinstance(effect, Acknowledge) or effect.ticket[0] != message.to:
        return None
    reports = pack_reports(run.rules.reports())
    return PiggybackedResp(effect.ticket[1], run.rules.flow.count_for(message.to), reports)
