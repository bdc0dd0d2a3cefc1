"""The future of a call: a torch future that can also be awaited, cancelled, and waited for with a timeout."""

from __future__ import annotations

import asyncio
import threading
import weakref
from _thread import interrupt_main
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, TypeVar

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.contexts import current
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.calls.call import Access, Call
from telegrad.calls.reraise import another
from telegrad.errors import CallCancelled, DeadlineExceeded, TelegradError
from telegrad.interrupts import interruptible, shielded
from telegrad.torch_private import FutureBase
from telegrad.wire.devices import DevicePairs

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """The result of `rpc_async`. Without a call, it can be completed with `set_result` and `set_exception`.

    The thread that waits reads the reply itself. A thread of the agent runs callbacks.
    """

    def __init__(self, agent: Agent | None = None, *, keeps: object = None) -> None:
        FutureBase.__init__(self, [])
        self._agent = agent
        self._keeps = keeps  # kept alive until the call is over
        self._call: Call | None = None
        self._context: Context | None = None  # of a call in an autograd context: its callbacks run in the same context
        self._has_call = False  # only the call may complete it, which may happen before `_call` is set
        self._completing_thread = 0  # completes it when the call is over
        self._lock = threading.Lock()  # protects _outcome
        self._trace: TracebackType | None = None  # of the error passed to set_exception
        self._outcome: tuple[Any, Exception | None] | None = None
        self._source: weakref.ref[Future[Any]] | None = None  # the future that this one follows, see `then`

    # -- completion -------------------------------------------------------------------------------------------

    def start(
        self,
        to: str | int,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float | None,
        *,
        rref_access: Access | None = None,
        devices: DevicePairs | None = None,
    ) -> Future[T]:
        """Start the call of this future."""
        assert self._agent is not None
        self._has_call = True
        if current.get() is not None:
            self._context = copy_context()
        try:
            self._call = self._agent.client.begin(
                to, function, args, kwargs, timeout, self._ended, None, rref_access, devices
            )
        except BaseException:
            self._has_call = False
            raise
        return self

    def _ended(self, call: Call) -> None:
        self._keeps = None
        value, error = self._outcome or self._decode(call)
        context, self._context = self._context, None
        if context is not None:
            context.run(self._complete, value, error)
        elif error is None:  # the common case: saves a function call
            FutureBase.set_result(self, value)
        else:
            self._complete(value, error)

    def _complete(self, value: Any, error: Exception | None) -> None:
        if error is None:
            FutureBase.set_result(self, value)
        else:
            self._completing_thread = threading.get_ident()
            self.set_exception(error)

    @shielded
    def _decode(self, call: Call) -> tuple[Any, Exception | None]:
        """Return the outcome. The first thread that asks for it decodes it."""
        with self._lock:
            if self._outcome is None:
                assert self._agent is not None
                try:
                    self._outcome = self._agent.client.result(call), None
                except Exception as error:  # noqa: BLE001 - raised by whoever waits
                    self._outcome = None, self._translate(error).with_traceback(None)  # see telegrad.calls.reraise
            return self._outcome

    def set_result(self, result: T) -> None:
        """Complete a future that has no call. Raises if it has one."""
        self._check_no_call()
        super().set_result(result)

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]  # torch declares the type of the result
        """Complete a future that has no call with an error. Raises if it has one."""
        self._check_no_call()
        self._trace = getattr(result, "__traceback__", None)  # torch raises if it is not an exception
        super().set_exception(result)  # type: ignore[arg-type]  # see above

    def _check_no_call(self) -> None:
        if self._has_call and self._completing_thread != threading.get_ident():
            raise RuntimeError(
                f"Future can only be marked completed once, and this one is completed by {self._call or 'its call'}"
            )

    def _translate(self, error: Exception) -> Exception:
        """Return the exception that users see for an error of the call."""
        return error

    # -- for users ---------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has a result or an error."""
        return super().done() or (self._call is not None and self._call.done())

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result and return it, or raise its error. `timeout` (seconds) limits this wait, not the call."""
        agent, call = self._agent, self._call
        if agent is None or call is None:
            return self._wait_for_torch(timeout)
        deadline = None if timeout is None else agent.runtime.now() + timeout
        if call.answer is None and not agent.client.wait(call, deadline):
            raise DeadlineExceeded(
                f"waited {timeout:g} s for {call}, which is not answered yet",
                worker=call.worker,
                function=call.function,
                call=call.id,
                elapsed=timeout,
            )
        value, error = self._outcome or self._decode(call)
        if error is not None:
            raise another(error)
        return value  # type: ignore[no-any-return]  # its type is known only to the callee

    @interruptible
    def _wait_for_torch(self, timeout: float | None) -> T:
        if timeout is None and (self._agent is None or super().done()):
            return self._torch_result()
        if self._agent is not None:
            event = self._agent.runtime.event()
            super().add_done_callback(lambda _: event.set())
            deadline = None if timeout is None else self._agent.runtime.now() + timeout
            completed = self._agent.executor.wait(event, deadline)
        else:
            flag = threading.Event()
            super().add_done_callback(lambda _: flag.set())
            completed = flag.wait(timeout)
        if not completed:
            raise DeadlineExceeded(f"waited {timeout:g} s for a future that has not been completed", elapsed=timeout)
        return self._torch_result()

    def _torch_result(self) -> T:
        try:
            return super().wait()
        except Exception as error:  # noqa: BLE001 - raised below
            failed = error.with_traceback(self._trace)
        raise another(failed).with_traceback(self._trace)  # see telegrad.calls.reraise

    def value(self) -> T:
        """Return the result of a future that is done, or raise its error."""
        call = self._call
        if call is not None and call.done():
            return self.wait()
        if super().done():
            return self._torch_result()
        what = "this future, which nobody has completed," if call is None else f"{call}, which is not answered yet,"
        raise TelegradError(f"{what} has no value yet: wait() waits for it, and done() tells whether it is there")

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, which runs when this future is done."""
        next_future: Future[S] = type(self)(self._agent)  # type: ignore[assignment]  # of another result
        next_future._source = weakref.ref(self)
        context = copy_context()  # callbacks keep the autograd context and the default agent

        def run(_: torch.futures.Future[T]) -> None:
            try:
                result = _call(context, callback, self)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the next future
                next_future.set_exception(error if isinstance(error, Exception) else _interrupted(error))
            else:
                next_future.set_result(result)

        super().add_done_callback(run)
        return next_future

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call `callback` with this future when it is done, or at once if it is."""
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
        """Cancel the call on both sides. Returns False if the call is over or there is none."""
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
        call = self._awaited_call()
        if call is not None:
            call.awaited += 1
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            if call is not None:
                call.awaited -= 1
        return self.value()

    def _awaited_call(self) -> Call | None:
        """Return the call that whoever awaits this future waits for."""
        future: Future[Any] | None = self
        while future is not None and future._call is None:
            future = None if future._source is None else future._source()
        return None if future is None else future._call


@interruptible
def _call(context: Context, callback: Callable[[Any], S], future: torch.futures.Future[Any]) -> S:
    return context.run(callback, future)


def _interrupted(error: BaseException) -> Exception:
    """Return the error for a future whose callback was interrupted.

    Callbacks of a future that is already done run in the user's thread. Torch logs exceptions of callbacks and
    continues, so we raise Ctrl-C again afterwards.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        interrupt_main()
    cancelled = CallCancelled(f"a callback was interrupted ({type(error).__name__})")
    cancelled.__cause__ = error
    return cancelled


keep_uncompiled(__name__)
