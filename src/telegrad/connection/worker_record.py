"""What workers tell each other, before they talk, about who they are and where they can be reached.

These records pass through the rendezvous store, which is not trusted: they are plain data, and whoever answers at
an address still has to prove in the handshake that it is the worker named here.
"""

from __future__ import annotations

import re

import msgspec

_NAME = re.compile(r"[0-9A-Za-z_:-]+\Z")
MAX_NAME = 127
MAX_ID = 0xFFFF


class WorkerRecord(msgspec.Struct, frozen=True):
    """One worker of the group, in one of its lives."""

    name: str
    id: int
    incarnation: int
    """A random 64-bit number for this life of the worker: a restarted one is another."""
    addresses: tuple[str, ...]
    """Where it listens, best first: ``unix:///path``, ``tcp://host:port``, ``memory://name``."""
    host: str = ""
    """Equal on two workers only if they can reach each other's unix sockets."""
    main: str = ""
    """Identifies the program that runs as ``__main__``; functions in it go by name between equal programs."""


def check_name(name: str) -> str:
    """Return `name` if a worker may be called so, else raise a ValueError that states the rule."""
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"{name!r} cannot be a worker's name: a name is 1 to {MAX_NAME} characters out of letters, digits, "
            "'_', ':' and '-'"
        )
    return name


def check_id(worker_id: int) -> int:
    """Return `worker_id` if a worker may have it (it must fit in 16 bits), else raise a ValueError."""
    if not 0 <= worker_id <= MAX_ID:
        raise ValueError(f"{worker_id} cannot be a worker's id: ids are 0 to {MAX_ID}")
    return worker_id
