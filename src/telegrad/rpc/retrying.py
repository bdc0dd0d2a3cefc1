"""Calls that are made again on the replacement, if their callee is lost.

Only the loss of the callee counts. What the function itself raises, even a WorkerLost of a worker that it called, is
the outcome of the call. A worker that left in order is not waited for, but one that ended with an error is: its
launcher may start it again.

Each attempt encodes the arguments again, so it is recorded again in the autograd context and makes new forks of its
RRefs. The send of a lost attempt stays in the context and gets no gradient, as that of an unused output. The arguments
of `rpc_async` may change once it has returned. So those are compared with what they were, and if they have changed,
the call is not made again.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import current
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import Call, current_served
from telegrad.connection.peer_table import Peer
from telegrad.errors import CallCancelled, DeadlineExceeded, NotInitialized, PayloadError, WorkerLost
from telegrad.execution.autocast import current_autocast, enter_autocast
from telegrad.execution.executor import GuaranteedTask
from telegrad.execution.reported_wait import ReportedWait
from telegrad.futures import Future
from telegrad.rpc.idempotence import RetryPolicy
from telegrad.torch_private import version_of
from telegrad.waiting_report import seconds
from telegrad.wire.devices import DevicePairs

T = TypeVar("T")

_log = logging.getLogger("telegrad")

_SLICE = 0.25  # seconds after which a wait looks whether the call was cancelled


class RetriedCall:
    """One call of an idempotent function, in as many attempts as it needs."""

    def __init__(
        self,
        agent: Agent,
        policy: RetryPolicy,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        devices: DevicePairs | None,
    ) -> None:
        self._agent = agent
        self._policy = policy
        self._to = agent.peers.find(to).record.name
        self._request = function, args, kwargs
        self._what = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        self._devices = devices
        self._started = agent.runtime.now()
        timeout = agent.settings.rpc_timeout if timeout is None else timeout
        self._deadline = self._started + timeout if timeout else None
        served = current_served.get()
        if served is not None and served.deadline is not None:
            self._deadline = served.deadline if self._deadline is None else min(self._deadline, served.deadline)
        self.attempts = 0
        self._peer: Peer | None = None  # of the current attempt
        self._lock = threading.Lock()  # protects the two below
        self._call: Call | None = None
        self._cancelled = False
        self.unchanged: Callable[[], bool] | None = None
        """Returns whether the arguments are what they were, if they may change."""

    def run(self) -> Any:
        """Make the call, and return its result."""
        self.open()
        try:
            outcome = self._try()
            return self.run_again(outcome) if isinstance(outcome, WorkerLost) else self._agent.client.result(outcome)
        finally:
            self.close()

    def open(self) -> None:
        """Begin: until `close`, a graceful shutdown waits for the call."""
        self._agent.client.retried.add(self)

    def close(self) -> None:
        """End: no other attempt will be made."""
        self._agent.client.retried.discard(self)
        on_idle = self._agent.local.on_idle
        if on_idle is not None:
            on_idle()

    def suspended(self) -> str:
        """Describe the call if no attempt is in flight; empty if one is."""
        call = self._call
        if call is not None and not call.done():
            return ""
        return f"a call on worker {self._to!r}, which is lost, waits for its replacement"

    def begin(self, on_done: Callable[[Call], None] | None = None) -> Call:
        """Start an attempt. Raises WorkerLost if the callee is known to be lost."""
        function, args, kwargs = self._request
        timeout = 0.0
        if self._deadline is not None:
            timeout = max(1e-3, self._deadline - self._agent.runtime.now())
        self.attempts += 1
        self._peer = self._agent.peers.find(self._to)
        call = self._agent.client.begin(self._to, function, args, kwargs, timeout, on_done, devices=self._devices)
        with self._lock:
            self._call = call
            cancelled = self._cancelled
        if cancelled:
            self._agent.cancel(call)
        return call

    def cancel(self) -> bool:
        """Cancel the current attempt, and make no other one."""
        with self._lock:
            self._cancelled, call = True, self._call
        if call is not None:
            self._agent.cancel(call)
        return True

    def _try(self) -> Call | WorkerLost:
        """Make an attempt. Returns the call, or why it was lost."""
        client = self._agent.client
        try:
            call = self.begin()
        except WorkerLost as lost:
            return lost
        try:
            client.wait(call)
        except BaseException:
            client.cancel(call, "the caller was interrupted")
            raise
        return call.error if isinstance(call.error, WorkerLost) else call

    def run_again(self, lost: WorkerLost) -> Any:
        """Make the call again after an attempt was lost, and return its result."""
        while True:
            peer = self._peer
            if peer is None or _has_finished(peer) or self._agent.closed or self.attempts > self._policy.retries:
                raise self._failed(lost)
            self._wait_for_replacement(peer, lost)
            if self.unchanged is not None and not self.unchanged():
                raise self._failed(lost, ", and not again because its arguments were changed since")
            _log.warning(
                "worker %r calls %s on worker %r again (attempt %d of %d): %s",
                self._agent.me.name,
                self._what,
                self._to,
                self.attempts + 1,
                self._policy.retries + 1,
                lost,
            )
            outcome = self._try()
            if isinstance(outcome, WorkerLost):
                lost = outcome
                continue
            try:
                return self._agent.client.result(outcome)
            except Exception as error:
                error.add_note(f"This was attempt {self.attempts}. The worker was lost in those before, and replaced.")
                raise

    def _wait_for_replacement(self, peer: Peer, lost: WorkerLost) -> None:
        """Wait for as long as the policy says, and then until the lost worker was replaced."""
        agent, runtime = self._agent, self._agent.runtime
        jitter = runtime.random_bits(32) / 2**32
        ready = runtime.now() + self._policy.delay(self.attempts, jitter)

        def report(elapsed: float) -> None:
            _log.warning(
                "worker %r has waited %s for a replacement of worker %r, to call %s there",
                agent.me.name,
                seconds(elapsed),
                self._to,
                self._what,
            )

        with ReportedWait(runtime, agent.executor, report):
            while True:
                self._check(lost)
                now = runtime.now()
                until = min(now + _SLICE, now + _SLICE if self._deadline is None else self._deadline)
                if now < ready:
                    agent.executor.wait(runtime.event(), min(ready, until))
                elif not peer.gone or agent.peers.find(self._to) is not peer:
                    return
                elif agent.peers.members.wait_for(self._to, until) and agent.peers.find(self._to) is peer:
                    agent.executor.pause()  # its loss is being reported to the membership

    def _check(self, lost: WorkerLost) -> None:
        """Raise if the call is over, while it waits for the replacement of its callee."""
        agent, served, now = self._agent, current_served.get(), self._agent.runtime.now()
        if self._cancelled:
            raise CallCancelled(
                f"the call of {self._what} on worker {self._to!r} was cancelled after {self._times()}, while it "
                "waited for the replacement of the lost worker",
                worker=self._to,
                function=self._what,
            ) from lost
        if served is not None:
            served.check()
        if agent.closed:
            raise NotInitialized(f"worker {agent.me.name!r} cannot call: {agent.closed}") from lost
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceeded(
                f"worker {self._to!r} is lost, and was not replaced before the deadline of the call of {self._what}, "
                f"after {self._times()}; the function may or may not have run",
                worker=self._to,
                function=self._what,
                elapsed=now - self._started,
            ) from lost

    def _times(self) -> str:
        return f"{self.attempts} attempt{'' if self.attempts == 1 else 's'}"

    def _failed(self, lost: WorkerLost, why: str = "") -> WorkerLost:
        error = WorkerLost(
            f"{lost}. {self._what} was called in {self._times()}{why}",
            worker=lost.worker,
            function=self._what,
            call=lost.call,
            context=lost.context,
            elapsed=self._agent.runtime.now() - self._started,
        )
        error.__cause__ = lost
        return error


def _has_finished(peer: Peer) -> bool:
    """Return whether a worker has left the group in order, and not because of an error."""
    return peer.left and peer.failed_at is None


class RetriedFuture(Future[T]):
    """The future of a call that is made again if its callee is lost."""

    _retried: RetriedCall | None = None

    def start_retried(
        self, call: RetriedCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> RetriedFuture[T]:
        """Start the call of this future."""
        agent = self._agent
        assert agent is not None
        call.unchanged = _fingerprint_check(agent, args, kwargs)
        self._grad_mode = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = current_autocast()
        self._caller = copy_context()
        self._has_call, self._retried = True, call
        call.open()
        try:
            call.begin(self._attempt_ended)
        except WorkerLost as lost:
            agent.executor.submit(GuaranteedTask(self._again, call, lost))
        except BaseException:
            self._has_call, self._retried = False, None
            call.close()
            raise
        return self

    def _attempt_ended(self, attempt: Call) -> None:
        call, agent = self._retried, self._agent
        assert call is not None
        assert agent is not None
        if isinstance(attempt.error, WorkerLost):
            self._again(call, attempt.error)
        else:
            self._finish(partial(agent.client.result, attempt))

    def _again(self, call: RetriedCall, lost: WorkerLost) -> None:
        """Make the other attempts, on this thread and as the caller would."""

        def run() -> Any:
            with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad_mode):
                with enter_autocast(self._autocast):
                    return call.run_again(lost)

        self._finish(run)

    def _finish(self, outcome: Callable[[], Any]) -> None:
        """Complete the future. Callbacks run in the context of the caller, as those of other futures."""
        value, error = None, None
        try:
            value = self._caller.run(outcome)
        except BaseException as raised:  # noqa: BLE001 - raised by whoever waits
            error = raised if isinstance(raised, Exception) else _of_a_value(raised)
            error = self._translate(error).with_traceback(None)  # see telegrad.calls.reraise
        call, self._retried = self._retried, None
        try:
            self._caller.run(self._complete, value, error)
        finally:
            if call is not None:
                call.close()

    def cancel(self) -> bool:
        """Cancel the call on both sides. Returns False if the call is over."""
        call = self._retried
        return call is not None and not self.done() and call.cancel()


def _of_a_value(raised: BaseException) -> PayloadError:
    """Return the error for whoever waits, if a value has raised what would end the program, as SystemExit.

    It must not end a thread of the executor, on which nobody would complete the future.
    """
    kind = type(raised).__name__
    error = PayloadError(f"a value of the call raised {kind} when it was pickled or unpickled: {raised}")
    error.__cause__ = raised.with_traceback(None)
    return error


def _fingerprint_check(agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Callable[[], bool]:
    """Return a function that says whether the arguments of a call are what they are now."""
    edges = current.get() is not None

    def fingerprint() -> tuple[bytes, list[object]]:
        encoded = agent.pipeline.encode((args, kwargs or {}), root=("args", "kwargs"), main_by_name=True, edges=edges)
        return encoded.data, [_state_of(attachment) for attachment in encoded.attachments]

    before = fingerprint()
    return lambda: fingerprint() == before


def _state_of(attachment: torch.Tensor | pickle.PickleBuffer) -> object:
    if isinstance(attachment, pickle.PickleBuffer):
        return hashlib.blake2b(attachment.raw()).digest()
    return id(attachment), None if attachment.is_inference() else version_of(attachment)


keep_uncompiled(__name__)
