"""The future of a call: torch's own, that can also be awaited, waited for with a timeout, and cancelled."""

from __future__ import annotations

import asyncio
import threading
from _thread import interrupt_main
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, TypeVar

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import current
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import Call
from telegrad.calls.reraise import another
from telegrad.errors import CallCancelled, DeadlineExceeded
from telegrad.interrupts import interruptible, shielded
from telegrad.wire.messages import RRefAccess

T = TypeVar("T")
S = TypeVar("S")

_Plain = torch._C.Future
"""What torch's Future is made of, without the Python functions around it."""


class Future(torch.futures.Future[T]):
    """What `rpc_async` returns. Also works without a call, as torch's does: `set_result`, `set_exception`.

    The thread that waits reads the answer itself; callbacks are run by a thread of the agent.
    """

    def __init__(self, agent: Agent | None = None, *, keeps: object = None) -> None:
        _Plain.__init__(self, [])
        self._agent = agent
        self._keeps = keeps  # alive for as long as the call is under way
        self._call: Call | None = None
        self._made_in: Context | None = None  # of a call in an autograd context, which torch's callbacks are to follow
        self._is_calls = False  # which alone completes it; its thread may do so before `_call` is set
        self._completed_by = 0  # the thread that does, when the call has ended
        self._lock = threading.Lock()  # protects _outcome
        self._trace: TracebackType | None = None  # of the error that was set
        self._outcome: tuple[Any, Exception | None] | None = None

    # -- the call's side --------------------------------------------------------------------------------------

    def start(
        self,
        to: str | int,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float | None,
        *,
        visit: RRefAccess | None = None,
    ) -> Future[T]:
        """Make the call that this is the future of."""
        assert self._agent is not None
        self._is_calls = True
        if current.get() is not None:
            self._made_in = copy_context()
        try:
            self._call = self._agent.client.begin(to, function, args, kwargs, timeout, self._ended, None, visit)
        except BaseException:
            self._is_calls = False
            raise
        return self

    def _ended(self, call: Call) -> None:
        self._keeps = None
        value, error = self._outcome or self._take(call)
        made_in, self._made_in = self._made_in, None
        if made_in is not None:
            made_in.run(self._complete, value, error)
        elif error is None:  # as nearly all: one function less
            _Plain.set_result(self, value)
        else:
            self._complete(value, error)

    def _complete(self, value: Any, error: Exception | None) -> None:
        if error is None:
            _Plain.set_result(self, value)
        else:
            self._completed_by = threading.get_ident()
            self.set_exception(error)

    @shielded
    def _take(self, call: Call) -> tuple[Any, Exception | None]:
        """The outcome, decoded once, by whoever is first."""
        with self._lock:
            if self._outcome is None:
                assert self._agent is not None
                try:
                    self._outcome = self._agent.client.result(call), None
                except Exception as error:  # noqa: BLE001 - it is the call's, and goes to whoever waits
                    self._outcome = None, self._shown(error).with_traceback(None)  # see telegrad.calls.reraise
            return self._outcome

    def set_result(self, result: T) -> None:
        """Complete a future that is no call's. That of a call is completed by the call, and by it alone."""
        self._check_unmarked()
        super().set_result(result)

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]  # torch says the type of the result
        """Let it fail; the same holds."""
        self._check_unmarked()
        self._trace = getattr(result, "__traceback__", None)  # torch says what is wrong with what is no exception
        super().set_exception(result)  # type: ignore[arg-type]  # see above

    def _check_unmarked(self) -> None:
        if self._is_calls and self._completed_by != threading.get_ident():
            raise RuntimeError(
                "Future can only be marked completed once, and this one is marked by "
                f"{self._call or 'its call'} when it has ended"
            )

    def _shown(self, error: Exception) -> Exception:
        """What whoever waits gets to see of the call's error."""
        return error

    # -- the user's side --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has a result or an error."""
        return super().done() or (self._call is not None and self._call.done())

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result, and return it or raise its error. `timeout` in seconds bounds this wait only."""
        agent, call = self._agent, self._call
        if agent is None or call is None:
            return self._wait_for_torch(timeout)
        deadline = None if timeout is None else agent.runtime.now() + timeout
        if call.answer is None and not agent.client.wait(call, deadline):
            raise DeadlineExceeded(
                f"waited {timeout:g} s for {call}, which is still under way",
                worker=call.worker,
                function=call.function,
                call=call.id,
                elapsed=timeout,
            )
        value, error = self._outcome or self._take(call)
        if error is not None:
            raise another(error)
        return value  # type: ignore[no-any-return]  # the callee knows its type

    @interruptible
    def _wait_for_torch(self, timeout: float | None) -> T:
        if timeout is None and (self._agent is None or super().done()):
            return self._torch_result()
        if self._agent is not None:
            arrived = self._agent.runtime.event()
            super().add_done_callback(lambda _: arrived.set())
            deadline = None if timeout is None else self._agent.runtime.now() + timeout
            came = self._agent.executor.wait(arrived, deadline)
        else:
            flag = threading.Event()
            super().add_done_callback(lambda _: flag.set())
            came = flag.wait(timeout)
        if not came:
            raise DeadlineExceeded(f"waited {timeout:g} s for a future that nobody has set", elapsed=timeout)
        return self._torch_result()

    def _torch_result(self) -> T:
        try:
            return super().wait()
        except Exception as error:  # noqa: BLE001 - it is raised below
            failed = error.with_traceback(self._trace)
        raise another(failed).with_traceback(self._trace)  # see telegrad.calls.reraise

    def value(self) -> T:
        """The result of a future that is done; raises its error."""
        call = self._call
        if call is not None and call.done():
            return self.wait()
        return self._torch_result() if super().done() else super().value()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future of what `callback`, given this one when it is done, returns or raises."""
        following: Future[S] = type(self)(self._agent)  # type: ignore[assignment]  # of another result
        context = copy_context()  # an autograd context, and which agent is meant, follow into callbacks

        def run(_: torch.futures.Future[T]) -> None:
            try:
                result = _call(context, callback, self)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the next future
                following.set_exception(error if isinstance(error, Exception) else _interrupted(error))
            else:
                following.set_result(result)

        super().add_done_callback(run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Have `callback` called with this future when it is done (at once, if it is)."""
        context = copy_context()

        def run(_: torch.futures.Future[T]) -> None:
            try:
                _call(context, callback, self)
            except Exception:
                raise
            except BaseException as error:  # noqa: BLE001 - see _interrupted
                _interrupted(error)

        super().add_done_callback(run)

    def cancel(self) -> bool:
        """Give the call up and tell the callee. False if it has ended, or is no call."""
        if self._agent is None or self._call is None:
            return False
        return self._agent.cancel(self._call)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def ended(_: torch.futures.Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        super().add_done_callback(ended)
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.value()


@interruptible
def _call(context: Context, callback: Callable[[Any], S], future: torch.futures.Future[Any]) -> S:
    return context.run(callback, future)


def _interrupted(error: BaseException) -> Exception:
    """What a future gets whose callback was interrupted: the callback of one that was done runs in the user's thread.

    Torch logs what callbacks raise, and goes on; so Ctrl-C is raised again, after it.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        interrupt_main()
    cancelled = CallCancelled(f"a callback was interrupted ({type(error).__name__})")
    cancelled.__cause__ = error
    return cancelled


keep_uncompiled(__name__)
