"""How a worker is named in the API."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.agent.group import check_name
from telegrad.errors import InvalidName


@dataclass(frozen=True, repr=False)
class WorkerInfo:
    """A worker's name and id. Can be given wherever a worker is asked for."""

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
