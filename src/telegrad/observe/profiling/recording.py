"""Records what threads of this worker do for another worker, with torch's older profiler.

That profiler records one thread, from when it is started there until it is stopped there. So a recording consists of
*segments*: one for a function, one for each step of a coroutine, one for each island of a pass. If the function uses a
profiler itself, which torch allows only one of on a thread, the recording pauses until that one is stopped.
"""

from __future__ import annotations

import threading
import time

import msgspec

from telegrad.torch_private_profiler import (
    Record,
    is_hidden,
    is_shown_line,
    is_watched,
    start_recording,
    stop_recording,
)
from telegrad.wire.profiles import ASYNC, NameTable, ProfiledEvent
from telegrad.wire.profiling_messages import FLOPS, MEMORY, SHAPES, STACKS

MOST_EVENTS = 100_000
"""Most events of one recording that are read: it takes some 10 us each. The first ones count."""
_BEGIN = "__start_profile"


class Segment(msgspec.Struct, eq=False):
    """What was recorded on one thread without interruption."""

    began: int
    """Unix time in nanoseconds."""
    records: list[list[Record]]


class Recording:
    """What threads do for one call or pass, as far as they are in a block of `on_this_thread`."""

    def __init__(self, options: int) -> None:
        self.options = options
        self._lock = threading.Lock()  # protects _segments
        self._segments: list[Segment] = []

    def on_this_thread(self) -> Block:
        """Return a context manager that records what this thread does, unless a profiler watches it already."""
        return Block(self)

    def add(self, segment: Segment) -> None:
        """Keep a segment."""
        with self._lock:
            self._segments.append(segment)

    def segments(self) -> list[Segment]:
        """Return the segments that are complete."""
        with self._lock:
            return list(self._segments)


class Block:
    """Records a thread for a while."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._began = 0  # while it records
        self._entered = False

    def __enter__(self) -> None:
        if not is_watched():
            self._start()
            self._entered = True
            _here.block = self

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _here.block = None
            self._stop()

    def _start(self) -> None:
        options = self._recording.options
        start_recording(bool(options & SHAPES), bool(options & MEMORY), bool(options & FLOPS), bool(options & STACKS))
        self._began = time.time_ns()

    def _stop(self) -> None:
        began, self._began = self._began, 0
        if began and is_watched():  # else the function has stopped it
            self._recording.add(Segment(began, stop_recording()))

    def pause(self) -> None:
        """Stop recording, because the function starts a profiler of its own."""
        self._stop()

    def resume(self) -> None:
        """Record again, if it was paused."""
        if not self._began and not is_watched():
            self._start()


class _Here(threading.local):
    block: Block | None = None


_here = _Here()


def block_here() -> Block | None:
    """Return the block that records this thread."""
    return _here.block


# -- records to events ------------------------------------------------------------------------------------------


class _Open(msgspec.Struct, eq=False):
    """An event that has begun."""

    record: Record
    name: str
    start: int
    cpu_memory: int = 0
    device_memory: int = 0


class RecordReader:
    """Makes events of the records of one recording.

    An event may begin in one segment and end in another, as a block around an `await` does. Those without an end are
    left out.
    """

    def __init__(self, began: int, worker: int, table: NameTable, most: int = MOST_EVENTS) -> None:
        self._began = began
        self._worker = worker
        self._table = table
        self._most = most
        self._unfinished: dict[int, _Open] = {}
        self._begun = 0
        self.events: list[ProfiledEvent] = []
        """In the order of their ends."""
        self.left_out = 0
        """How many events were not read, because there are more than `most`."""

    def read(self, segments: list[Segment]) -> None:
        """Read segments, in the order in which they were recorded."""
        for segment in segments:
            zero = next((each for records in segment.records for each in records if each.name() == _BEGIN), None)
            if zero is not None:
                for records in segment.records:
                    self._read(records, zero, segment.began - self._began)

    def _read(self, records: list[Record], zero: Record, offset: int) -> None:
        mine: dict[int, _Open] = {}  # those that began on this thread, in this segment
        unfinished = self._unfinished
        last_begun = ""  # if the record before was the beginning of an event
        for record in records:
            kind = record.kind()
            if kind == "push":
                if self._begun >= self._most:
                    self.left_out += 1
                    continue
                # Torch records some operators twice: the wrapper, and what it calls.
                name = record.name()
                if not is_hidden(name) and name != last_begun:
                    self._begun += 1
                    handle = record.handle()
                    start = offset + round(zero.cpu_elapsed_us(record) * 1000)
                    mine[handle] = unfinished[handle] = _Open(record, name, start)
                last_begun = name
                continue
            last_begun = ""
            if kind == "pop":
                found = unfinished.pop(record.handle(), None)
                if found is not None:
                    mine.pop(record.handle(), None)
                    self._add(found, record, offset + round(zero.cpu_elapsed_us(record) * 1000))
            elif kind == "memory_alloc" and mine:
                cpu, device = record.cpu_memory_usage(), record.cuda_memory_usage()
                for around in mine.values():
                    around.cpu_memory += cpu
                    around.device_memory += device

    def _add(self, begun: _Open, end: Record, ended: int) -> None:
        record, table = begun.record, self._table
        is_async = record.is_async() or record.thread_id() != end.thread_id()
        self.events.append(
            ProfiledEvent(
                table.index(begun.name),
                self._worker,
                record.thread_id(),
                begun.start,
                max(0, ended - begun.start),
                ASYNC if is_async else 0,
                record.scope(),
                record.sequence_nr(),
                record.fwd_thread_id(),
                begun.cpu_memory,
                begun.device_memory,
                record.flops(),
                record.shapes(),
                table.indices([line for line in record.stack() if is_shown_line(line)]),
            )
        )
