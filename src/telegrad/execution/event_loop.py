"""Runs coroutines of user functions that are ``async def``: one event loop for the agent, started when first needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from telegrad.execution.autocast import entered
from telegrad.execution.executor import Executor
from telegrad.waiting import Runtime
from telegrad.wire.messages import Autocast

T = TypeVar("T")


class _Exit(Exception):
    """Stands for an exception that asyncio would raise in the loop, which would end it for everybody."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class InGradMode(Coroutine[Any, Any, T]):
    """A coroutine that begins in this grad mode and runs in this autocast.

    What it sets of grad mode is its own: others run on its thread meanwhile.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], mode: bool, autocast: Autocast | None = None) -> None:
        self._coroutine = coroutine
        self._mode = mode
        self._autocast = autocast

    def send(self, value: Any) -> Any:
        """Go on until it next waits."""
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """The same, with an exception where it waits."""
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        """End it where it waits."""
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _step(self, go: Callable[..., Any], *args: Any) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._mode)
        try:
            if self._autocast is None:
                return go(*args)
            with entered(self._autocast):
                return go(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _Exit(error) from None
        finally:
            self._mode = torch.is_grad_enabled()
            torch.set_grad_enabled(before)


class EventLoop:
    """The loop and its thread."""

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._executor = executor
        self._lock = threading.Lock()  # protects _loop and _closed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.blocked_for: int | None = None
        """The context of a backward pass that a coroutine waits for without awaiting it: nothing runs here meanwhile.
        Only the loop's own thread sets it."""

    def run(
        self, coroutine: Coroutine[Any, Any, Any], done: Callable[[object, BaseException | None], None]
    ) -> Callable[[], None]:
        """Run `coroutine` in the current context and tell `done` how it ended. Returns what cancels it."""
        context = copy_context()
        tasks: list[asyncio.Task[Any]] = []
        try:
            loop = self._started()
        except BaseException:
            coroutine.close()  # it will never be awaited
            raise

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

        loop.call_soon_threadsafe(start)
        return lambda: None if loop.is_closed() else _threadsafe(loop, lambda: [task.cancel() for task in tasks])

    def runs_here(self, loop: object) -> bool:
        """Whether `loop` is this one."""
        return loop is self._loop

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the agent has been shut down")
            if self._loop is None:
                make: Callable[[], asyncio.AbstractEventLoop] = getattr(
                    self._runtime, "new_event_loop", asyncio.new_event_loop
                )
                loop = make()
                try:
                    self._executor.start_thread("event loop", lambda: _run(loop))
                except BaseException:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def close(self) -> None:
        """Cancel what runs, and end the loop."""
        with self._lock:
            self._closed = True
            loop = self._loop
        if loop is not None and not loop.is_closed():
            _threadsafe(loop, loop.stop)


def _threadsafe(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:  # it closed meanwhile: then there is nothing left to do
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
