"""The futures of the drop-in: telegrad's, with the errors and texts that programs written for torch expect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.drop_in.rpc.texts import as_torch
from telegrad.futures import Future as TelegradFuture

T = TypeVar("T")
S = TypeVar("S")


class Future(TelegradFuture[T]):
    """What `rpc_async` returns under the drop-in."""

    builtin = False
    """Whether the function is an operator of torch."""

    def _translate(self, error: Exception) -> Exception:
        assert self._agent is not None
        shown = as_torch(error, self._agent, builtin=self.builtin)
        shown.__cause__ = error
        return shown

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> TelegradFuture[S]:
        """A future of what `callback` returns; what it raises becomes a RuntimeError, as in torch."""
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
        """Have `callback` called with this future when it is done."""
        _check_callable("add_done_callback", callback)
        super().add_done_callback(callback)


def failed(error: Exception) -> Future[Any]:
    """A future that has failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _check_callable(method: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"{method}(): incompatible function arguments. A callable is needed, not {callback!r}")


_collect_all = torch.futures.collect_all


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """A future of all `futures`, done when all are, or as soon as one has failed.

    Torch's own sees errors that C++ set early, and those that Python set, as ours, only when all are done.
    """
    if not any(isinstance(future, TelegradFuture) for future in futures):
        return _collect_all(list(futures))
    together: TelegradFuture[list[torch.futures.Future[Any]]] = Future()
    lock = threading.Lock()  # protects the two below
    missing = len(futures)
    over = False

    def ended(future: torch.futures.Future[Any]) -> None:
        nonlocal missing, over
        error: Exception | None = None
        try:
            future.value()
        except Exception as failure:  # noqa: BLE001 - it goes to whoever waits
            error = failure
        with lock:
            missing -= 1
            if over or (error is None and missing):
                return
            over = True
        if error is not None:
            together.set_exception(error)
        else:
            together.set_result(list(futures))

    for future in futures:
        future.add_done_callback(ended)
    return together


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all `futures`; raises as soon as one has failed."""
    return [future.wait() for future in collect_all(futures).wait()]


keep_uncompiled(__name__)
