"""What a worker tells the driver: where it runs, and how its function ended."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from telegrad.launch.process_exit import ProcessId
from telegrad.launch.worker_result import RaisedException


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    node: str
    """The id of its Ray node."""
    address: str
    """The IP address of the node."""
    process: ProcessId


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: its function returned or raised, or its process died. Same methods as `WorkerResult`."""

    pickled: bytes | None = field(default=None, repr=False)
    """The value that the function returned."""
    exception: RaisedException | None = None
    death: str = "it still runs"
    """What Ray says about the death of the process."""
    node_lost: bool = False
    """Whether its node was lost, so that another start may succeed."""

    def complete(self) -> bool:
        """Return whether the function ended."""
        return self.pickled is not None or self.exception is not None

    def is_error(self) -> bool:
        """Return whether the function raised."""
        return self.exception is not None

    def value(self) -> Any:
        """Return the value that the function returned."""
        if self.pickled is None:
            raise ValueError("the function has not returned a value")
        return pickle.loads(self.pickled)

    def raised(self) -> RaisedException:
        """Return the exception that the function raised."""
        if self.exception is None:
            raise ValueError("the function has not raised an exception")
        return self.exception
