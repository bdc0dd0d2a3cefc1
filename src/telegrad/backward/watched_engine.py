"""Torch's engine as user code inside an island sees it.

All Python code uses the engine through one object of torch. The object here replaces it when the first agent is made.
Outside of islands it forwards everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from telegrad.backward.outgoing import send_held
from telegrad.backward.pass_run import PassRun, running
from telegrad.backward.reentrant import InnerLeaves, reached_leaves
from telegrad.interrupts import interruptible
from telegrad.torch_private import NO_TASK, EngineBase, engine_task, run_backward, use_engine
from telegrad.wire.messages import INTO_CONTEXT


class WatchedEngine(EngineBase):
    """Torch's engine object, which knows the pass whose island runs."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward. Inside an island its gradients go where those of the pass go."""
        run = running.get()
        # The context variable may have been copied to a thread that runs no island, as for a future's callback.
        if run is None or run.info.leaves != INTO_CONTEXT or engine_task() == NO_TASK:
            return run_backward(*args, **kwargs)
        return _run_inside(run, *args, **kwargs)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a callback for the end of the run. In an island it is called after all its gradients were sent."""
        run = running.get()
        super().queue_callback(callback if run is None else partial(_call_back, run, callback))

    def is_checkpoint_valid(self) -> bool:
        """Whether a backward inside this one works as in a backward without inputs.

        A pass into a context makes the engine capture gradients of leaves, which users must not notice.
        """
        run = running.get()
        if run is not None and run.info.leaves == INTO_CONTEXT and not run.messaging.inner_into_grad:
            return True
        valid: bool = super().is_checkpoint_valid()
        return valid


def watch_engine() -> None:
    """Replace torch's engine object, for the rest of the process."""
    use_engine(_ENGINE)


_ENGINE = WatchedEngine()


@interruptible
def _call_back(run: PassRun, callback: Callable[[], None]) -> None:
    send_held(run)
    callback()


def _run_inside(
    run: PassRun,
    outputs: Any,
    grads: Any,
    keep_graph: bool,
    create_graph: bool,
    inputs: Any = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    call = partial(run_backward, outputs, grads, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
    if not accumulate_grad:
        return call()
    thread, messaging = get_ident(), run.messaging
    if messaging.inner_into_grad:
        inside = messaging.accumulate_through.inner
        if thread in inside:
            return call()
        inside.add(thread)
        try:
            return call()
        finally:
            inside.discard(thread)
    leaves = run.inner.get(thread)
    if leaves is None:
        leaves = run.inner[thread] = InnerLeaves(messaging.slots, run.context.gradients, run.wait_for_slot)
    leaves.add(reached_leaves(outputs, inputs or ()))
    return call()
