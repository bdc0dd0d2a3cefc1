"""The message with which a worker asks another one to open a connection."""

from __future__ import annotations

import msgspec


class DialBack(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """A worker cannot connect to the receiver, which is to connect to it, or else to the sender, with this ticket."""

    ticket: bytes
    caller: int
    """The incarnation of the worker that wants the connection."""
