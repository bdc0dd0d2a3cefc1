"""What happened when on which worker, on one clock: spans with their parts, and arrows between them.

`telegrad.observe.timeline_builder` makes it from the events of a group. The trace and its summary are made from it.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from telegrad.observe.model import WorkerView


class Category(enum.StrEnum):
    """What a span is."""

    CALL = "call"
    SERVE = "serve"
    COMPUTE = "compute"
    SERIALISE = "serialise"
    WAIT = "wait"
    TRANSFER = "transfer"
    PASS = "pass"
    CONTEXT = "context"


class Part(msgspec.Struct, frozen=True):
    """A stage of a span."""

    category: Category
    began: float
    ended: float


class Span(msgspec.Struct, eq=False):
    """Something that took time."""

    worker: int
    """Its number in the timeline."""
    row: str
    """Where it is shown; a thread, or what it has in common with others."""
    name: str
    category: Category
    began: float
    ended: float
    thread: int = 0
    details: dict[str, Any] = {}
    parts: list[Part] = []
    open: bool = False
    """Whether it had not ended."""


class Instant(msgspec.Struct, frozen=True):
    """Something that took no time."""

    worker: int
    name: str
    time: float
    details: dict[str, Any] = {}


class Arrow(msgspec.Struct, frozen=True):
    """A message from one span to another, and perhaps to further ones."""

    name: str
    points: tuple[tuple[Span, float], ...]


class Timeline(msgspec.Struct, eq=False):
    """All of it. Times are seconds of the observer's clock."""

    began: float
    ended: float
    workers: list[WorkerView]
    offsets: list[float]
    """What was added to the times of each worker."""
    spans: list[Span]
    instants: list[Instant]
    arrows: list[Arrow]
    samples: list[list[tuple[float, int, int]]]
    """Of each worker: time, memory and calls that it serves."""
