"""The passes of each context on one worker: one at a time in a context."""

from __future__ import annotations

import threading

from telegrad.backward.contexts import Contexts, DistAutogradContext
from telegrad.backward.messaging import PassMessaging
from telegrad.backward.pass_run import PassRun
from telegrad.errors import TelegradError
from telegrad.wire.messages import PassInfo, PropagateGradientsResp

_MOST_PASSES = 16
"""How many passes a context keeps on one worker: those that failed must answer late messages, but not for ever."""


class Passes:
    """Finds the pass that a message belongs to, and refuses a second pass in a context."""

    def __init__(self, contexts: Contexts, messaging: PassMessaging) -> None:
        self._contexts = contexts
        self._messaging = messaging
        self._lock = threading.Lock()  # protects the passes of every context; taken before locks of passes

    def begin(self, context: DistAutogradContext, run: PassRun) -> None:
        """Add a pass that begins here. Raises if the context has another."""
        with self._lock:
            if context.passes and any(other.busy for other in list(context.passes.values())):
                raise TelegradError(
                    f"a backward pass of context {context.id:#x} is running on this worker already; run passes of one "
                    "context one after the other, or give each a context of its own"
                )
            if context.released:
                raise TelegradError(f"context {context.id:#x} has been left")
            context.passes = {run.info.number: run}

    def find(self, sender: int, call: int, info: PassInfo) -> PassRun | None:
        """Return the pass that a message belongs to, made if need be.

        Returns None if the message was late or is refused. It has been replied to then.
        """
        context = self._contexts.get(info.context)
        if context is None:
            name = self._messaging.agent.me.name
            self._refuse(sender, call, info, f"context {info.context:#x} is not known on worker {name!r} (any more)")
            return None
        run = context.passes.get(info.number)
        if run is not None:
            return run
        refusal = ""
        stale: list[PassRun] = []
        with self._lock:
            run = context.passes.get(info.number)
            if run is not None:
                return run
            if context.passes:
                others = list(context.passes.values())
                # A worker begins its passes of a context one after the other, with growing numbers.
                stale = [other for other in others if other.info.number >> 48 == info.number >> 48]
                if any(other.info.number > info.number for other in stale):
                    refusal = f"a later pass of context {info.context:#x} has already reached it"
                elif any(other.busy for other in others if other not in stale):
                    refusal = f"another pass of context {info.context:#x} is running there"
            if not refusal:
                run = PassRun(self._messaging, context, info)
                context.passes = {info.number: run}
        if run is None:
            self._refuse(sender, call, info, refusal)
            return None
        for other in stale:
            other.record()
            if other.busy:  # its failure will be reported, but what it left here must not wait for that
                other.fail(TelegradError("the worker that began this pass has begun another"))
        return run

    def find_for_abort(self, context: DistAutogradContext, info: PassInfo) -> PassRun:
        """Return a pass that has failed elsewhere, made as a tombstone if it is not known here."""
        with self._lock:  # or a pass that begins here at the same moment would take its place
            run = context.passes.get(info.number)
            if run is None:
                # Messages of the pass that are still under way are replied to, and change nothing.
                _forget_oldest(context.passes)
                run = PassRun(self._messaging, context, info)
                context.passes[info.number] = run
        return run

    def _refuse(self, sender: int, call: int, info: PassInfo, refusal: str) -> None:
        self._messaging.count("late gradient messages")
        head = PropagateGradientsResp(info.context, info.number, call, 0, (), refusal)
        self._messaging.agent.oneway.tell(sender, head)


def _forget_oldest(passes: dict[int, PassRun]) -> None:
    """Make room for one more pass: a peer may report the failure of any number of them."""
    for number, other in list(passes.items()):
        if len(passes) < _MOST_PASSES:
            return
        if not other.busy:
            del passes[number]
