"""What a profiler recorded on one worker, as bytes.

A profile is plain data: names, numbers, and lists of them. Its size is bounded. Where it would be larger, the shortest
events are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from telegrad.errors import ProtocolError

MOST_BYTES = 4 << 20
"""Most bytes of a profile: about 100,000 events."""

ASYNC, REMOTE = 1, 2
"""Flags of events: it began and ended on different threads; it comes from a worker that was called in turn."""


class ProfiledEvent(msgspec.Struct, array_like=True):
    """One event of a profiler: an operator, a node of autograd, a block that the user named, a call."""

    name: int
    """Index into the profile's names."""
    worker: int
    """The id of the worker on which it happened."""
    thread: int
    start: int
    """Nanoseconds since the profile began."""
    duration: Annotated[int, msgspec.Meta(ge=0)]
    """Nanoseconds."""
    flags: int = 0
    scope: int = 0
    """What kind of event it is, as torch numbers them."""
    sequence: int = -1
    """Relates nodes of the backward to operators of the forward pass."""
    forward_thread: int = 0
    cpu_memory: int = 0
    """Bytes allocated, less those freed."""
    device_memory: int = 0
    flops: int = 0
    shapes: list[list[int]] = []
    """Of the operator's inputs."""
    stack: list[int] = []
    """Lines of the Python stack, as indices into the profile's names."""


class Profile(msgspec.Struct, array_like=True):
    """What was recorded on one worker, and on those that it called."""

    began: int
    """Unix time on the worker's clock, in nanoseconds."""
    ended: int
    names: list[str]
    events: list[ProfiledEvent]
    left_out: int = 0
    """How many events were left out, because they did not fit."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Profile] = msgspec.msgpack.Decoder(Profile)


def encode_profile(profile: Profile, most: int = MOST_BYTES) -> bytes:
    """Encode a profile. If it does not fit, the shortest events are left out."""
    data = _encoder.encode(profile)
    while len(data) > most:
        kept = len(profile.events) * most // (2 * len(data))
        if not kept:  # its names alone are too long
            return _encoder.encode(
                Profile(profile.began, profile.ended, [], [], profile.left_out + len(profile.events))
            )
        profile = _longest(profile, kept)
        data = _encoder.encode(profile)
    return data


def decode_profile(data: bytes) -> Profile:
    """Decode a profile. Raise ProtocolError for anything else."""
    try:
        profile = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid profile: {error}") from error
    count = len(profile.names)
    for event in profile.events:
        if not all(0 <= index < count for index in (event.name, *event.stack)):
            raise ProtocolError("invalid profile: an event has a name that is not in the table")
    return profile


def _longest(profile: Profile, count: int) -> Profile:
    """Return a profile with the longest events only, in the same order, and with the names that they need."""
    shortest = sorted(range(len(profile.events)), key=lambda index: profile.events[index].duration)[:-count]
    dropped = set(shortest)
    table = NameTable()
    events = []
    for index, event in enumerate(profile.events):
        if index not in dropped:
            name = table.index(profile.names[event.name])
            stack = table.indices([profile.names[line] for line in event.stack])
            events.append(msgspec.structs.replace(event, name=name, stack=stack))
    return Profile(profile.began, profile.ended, table.names, events, profile.left_out + len(dropped))


class NameTable:
    """The names of a profile that is being made, each once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._indices: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return the index of a name."""
        found = self._indices.get(name)
        if found is None:
            found = self._indices[name] = len(self.names)
            self.names.append(name)
        return found

    def indices(self, names: Sequence[str]) -> list[int]:
        """Return the indices of names."""
        return [self.index(name) for name in names]
