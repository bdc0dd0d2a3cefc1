"""How a worker is named in the API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class WorkerInfo:
    """A worker's name and id. Can be given wherever a worker is asked for."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
