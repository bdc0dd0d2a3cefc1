"""The futures of the drop-in: telegrad's, with the errors that programs written for torch expect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.torch_errors import to_torch_error
from telegrad.futures import Future as TelegradFuture

T = TypeVar("T")
S = TypeVar("S")


class Future(TelegradFuture[T]):
    """The future that `rpc_async` returns under the drop-in."""

    builtin = False
    """Whether the function is a torch operator."""

    def _translate(self, error: Exception) -> Exception:
        assert self._agent is not None
        shown = to_torch_error(error, self._agent, builtin=self.builtin)
        shown.__cause__ = error
        return shown

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> TelegradFuture[S]:
        """Return a future of the result of `callback`. An exception in it becomes a RuntimeError, as in torch."""
        _check_callable("then", callback)

        def run(future: torch.futures.Future[T]) -> S:
            try:
                return callback(future)
            except Exception as error:
                raise RuntimeError(
                    f"Got the following error when running the callback: {type(error).__name__}: {error}"
                ) from error

        return super().then(run)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call `callback` with this future when it is done."""
        _check_callable("add_done_callback", callback)
        super().add_done_callback(callback)


def failed(error: Exception) -> Future[Any]:
    """Return a future that has failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _check_callable(method: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"{method}(): incompatible function arguments. A callable is needed, not {callback!r}")


_collect_all = torch.futures.collect_all


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """Return a future of all `futures`, done when all are done or as soon as one fails.

    Torch's `collect_all` fails early only for errors set from C++. For errors set from Python, as telegrad's are, it
    waits until all are done.
    """
    if not any(isinstance(future, TelegradFuture) for future in futures):
        return _collect_all(list(futures))
    combined: TelegradFuture[list[torch.futures.Future[Any]]] = Future()
    lock = threading.Lock()  # protects `remaining` and `finished`
    remaining = len(futures)
    finished = False

    def on_done(future: torch.futures.Future[Any]) -> None:
        nonlocal remaining, finished
        error: Exception | None = None
        try:
            future.value()
        except Exception as failure:  # noqa: BLE001 - raised in whoever waits
            error = failure
        with lock:
            remaining -= 1
            if finished or (error is None and remaining):
                return
            finished = True
        if error is not None:
            combined.set_exception(error)
        else:
            combined.set_result(list(futures))

    for future in futures:
        future.add_done_callback(on_done)
    return combined


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Return the values of all `futures`. Raises as soon as one fails."""
    return [future.wait() for future in collect_all(futures).wait()]


keep_uncompiled(__name__)
