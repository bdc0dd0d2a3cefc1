"""Runs ``async def`` user functions on one event loop per agent, started when first needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

import torch

from telegrad.execution.autocast import enter_autocast
from telegrad.execution.executor import Executor
from telegrad.waiting import Runtime
from telegrad.wire.messages import Autocast

T = TypeVar("T")


class _Exit(Exception):
    """Wraps SystemExit and KeyboardInterrupt, which asyncio would raise in the loop and so end it for all tasks."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class InGradMode(Coroutine[Any, Any, T]):
    """Wraps a coroutine to run with a grad mode and an autocast state of its own.

    Changes that it makes to the grad mode do not leak into other coroutines on the same thread.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], mode: bool, autocast: Autocast | None = None) -> None:
        self._coroutine = coroutine
        self._mode = mode
        self._autocast = autocast

    def send(self, value: Any) -> Any:
        """Run until the coroutine next awaits."""
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the coroutine awaits."""
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        """Close the coroutine where it awaits."""
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _step(self, go: Callable[..., Any], *args: Any) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._mode)
        try:
            if self._autocast is None:
                return go(*args)
            with enter_autocast(self._autocast):
                return go(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _Exit(error) from None
        finally:
            self._mode = torch.is_grad_enabled()
            torch.set_grad_enabled(before)


class EventLoop:
    """An asyncio event loop and its thread."""

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._executor = executor
        self._lock = threading.Lock()  # protects _loop and _closed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.blocked_for: int | None = None
        """The context of a backward pass that a coroutine waits for without `await`, which blocks the loop.
        Only the loop's thread sets it."""

    def run(
        self, coroutine: Coroutine[Any, Any, Any], done: Callable[[object, BaseException | None], None]
    ) -> Callable[[], None]:
        """Run `coroutine` in the current context, then call `done(result, error)`. Returns a function that cancels."""
        context = copy_context()
        tasks: list[asyncio.Task[Any]] = []

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                done(None, asyncio.CancelledError())
                return
            error = task.exception()
            if isinstance(error, _Exit):
                error = error.error
            done(None if error is not None else task.result(), error)

        def start() -> None:
            task = loop.create_task(coroutine, context=context)
            tasks.append(task)
            task.add_done_callback(ended)

        try:
            with self._lock:
                loop = self._started()
                loop.call_soon_threadsafe(start)  # before close() stops the loop, so the task is there to be cancelled
        except BaseException:
            coroutine.close()  # it will never be awaited
            raise
        return lambda: None if loop.is_closed() else _threadsafe(loop, lambda: [task.cancel() for task in tasks])

    def runs_here(self, loop: object) -> bool:
        """Return whether `loop` is this event loop."""
        return loop is self._loop

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the loop. Called with the lock held."""
        if self._closed:
            raise RuntimeError("the agent has been shut down")
        if self._loop is None:
            make: Callable[[], asyncio.AbstractEventLoop] = getattr(
                self._runtime, "new_event_loop", asyncio.new_event_loop
            )
            loop = Context().run(make)  # it keeps its context, which else has the call that is served here
            try:
                self._executor.threads.start("event loop", lambda: _run(loop))
            except BaseException:
                loop.close()
                raise
            self._loop = loop
        return self._loop

    def close(self) -> None:
        """Cancel all tasks and stop the loop."""
        with self._lock:
            self._closed = True
            if self._loop is not None and not self._loop.is_closed():
                _threadsafe(self._loop, self._loop.stop)


def _threadsafe(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # the loop was closed meanwhile, so nothing is left to do
        return


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
