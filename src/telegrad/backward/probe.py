"""The probe of a pass: finds out, before or during the pass, which sent tensors it reaches and needs.

`telegrad.protocol.backward` says when a pass needs it (rules 3 and 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from telegrad import events
from telegrad.backward.effects import carry_out
from telegrad.backward.inputs import Found
from telegrad.backward.messaging import ReplyTo
from telegrad.backward.outgoing import expect_reply, lost_sender, send
from telegrad.backward.pass_run import PassRun
from telegrad.protocol.backward import PassEffect
from telegrad.wire.messages import LeadsToInputReq, ProbeReq, ResumeReq


def begin_probe(run: PassRun, counter: str) -> None:
    """Begin the probe, with a walk from the roots."""
    run.messaging.count(counter)
    run.probe_began = run.messaging.now()
    walk(run, run.graph.probe)


def walk(run: PassRun, step: Callable[[], Found]) -> None:
    """Walk over this worker's graph, and tell other workers what that found."""
    rules = run.rules
    began = run.messaging.now()
    with run.lock:
        found = step()
        for _ in range(len(found.ask) + len(found.tell)):
            rules.probe_sent()
    for recv, indices in found.ask.items():
        lost = lost_sender(run, recv)
        if lost is not None:
            run.fail(lost)
            continue
        number = expect_reply(run, recv.source, rules.probe_acknowledged)
        send(run, recv.source, ProbeReq(number, run.info, recv.message, tuple(sorted(indices))))
    for sent, indices in found.tell.items():
        number = expect_reply(run, sent.target, rules.probe_acknowledged)
        send(run, sent.target, LeadsToInputReq(number, run.info, sent.message, tuple(sorted(indices))))
    ended = run.touched = run.messaging.now()
    run.note(events.PROBE, began, ended, run.info.number, what="walk")
    with run.lock:
        effects = rules.probe_walked()
    carry_out(run, effects)


def learn(run: PassRun) -> list[PassEffect[ReplyTo]]:
    """Plan what waits again, with live tensors only: the probe is over. Called with the lock held."""
    run.graph.known = True
    return run.rules.replan(run.graph.plan(run.rules.started_entries()))


def end_probe(run: PassRun, workers: Sequence[int]) -> None:
    """Tell these workers that the probe is over, and continue here."""
    run.note(events.PROBE, run.probe_began, run.messaging.now(), run.info.number, what="driven here")
    with run.lock:
        effects = learn(run)
        for _ in workers:
            run.rules.flow.sent()
    for worker in workers:
        send(run, worker, ResumeReq(expect_reply(run, worker, run.rules.acknowledged), run.info))
    carry_out(run, effects)
    with run.lock:
        effects = run.rules.resume_sent()
    carry_out(run, effects)
