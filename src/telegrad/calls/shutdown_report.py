"""The call with which a worker in a shutdown reports to another one, and waits for the end of the round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telegrad.calls.call import Call
from telegrad.calls.service_names import GATHER
from telegrad.connection.local_worker import LocalWorker
from telegrad.errors import WorkerLost

if TYPE_CHECKING:
    from telegrad.calls.client import Client


class ShutdownReport:
    """The report of this worker. It ends early if others have lost this worker."""

    def __init__(self, local: LocalWorker, client: Client) -> None:
        self._local = local
        self._client = client
        self._call: Call | None = None

    def send(self, to: str, arguments: tuple[Any, ...], timeout: float) -> object:
        """Call the worker to which this one reports, and return its answer. Raises if this worker is given up."""
        self._call = call = self._client.begin(to, GATHER, arguments, None, timeout)
        try:
            if self._local.given_up is not None:  # before `give_up` could find the call
                self.give_up(self._local.given_up)
            return self._client.complete(call)
        finally:
            self._call = None

    def give_up(self, error: WorkerLost) -> None:
        """End the wait: the worker that this one reports to may not be the one that has lost it."""
        call = self._call
        if call is not None:
            self._client.cancel(call, "its worker ends", error)
