"""Types of the public API that describe a worker: its identity and its traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from telegrad.connection.worker_record import check_name
from telegrad.errors import InvalidName


@dataclass(frozen=True, repr=False)
class WorkerInfo:
    """A worker's name and id. Accepted wherever a function takes a worker."""

    name: str
    id: int

    def __post_init__(self) -> None:
        try:
            check_name(self.name)
        except ValueError as error:
            raise InvalidName(
                "Worker name must match [0-9A-Za-z_:-]+, must be non-empty, and must be shorter than 128 characters, "
                f"but got {self.name!r}"
            ) from error

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class Traffic(NamedTuple):
    """Bytes of messages exchanged with another worker, over connections and through shared memory."""

    sent: int
    received: int


class WorkerStatus(NamedTuple):
    """What this worker knows about a member of its group."""

    name: str
    id: int
    state: Literal["alive", "lost", "left"]
    generation: int
    """Grows whenever the worker is replaced."""
    age: float
    """For how many seconds it has been in this state."""
    addresses: tuple[str, ...] = ()
    """Where it listens, for `Options.members` of a worker that joins."""
