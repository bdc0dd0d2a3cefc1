"""Workers of one machine find each other at a place that the launcher keeps: a store, a directory and a token.

The launcher hosts the store itself, on a socket that it has already bound, so there is no free port to guess and to
lose to somebody else. The socket listens on the loopback address only. Torch's ``env://`` rendezvous connects to it
as a client, because the environment says that an agent hosts the store (as under torchrun).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from telegrad.connection.worker_record import MAX_ID, check_name

HOST = "127.0.0.1"
# A unix socket's path has at most 107 bytes on Linux. Half of them are left to whoever puts sockets into the directory.
_LONGEST_PARENT = 40


def worker_names(workers: int | Sequence[str]) -> list[str]:
    """Return the names of the group's workers in rank order, or raise a ValueError that says what is wrong with them.

    >>> worker_names(2)
    ['worker0', 'worker1']
    >>> worker_names(["ps", "trainer"])
    ['ps', 'trainer']
    """
    if isinstance(workers, str):
        raise ValueError(f"workers must be a number or a list of names, not the string {workers!r}")
    if isinstance(workers, int):
        names = [f"worker{rank}" for rank in range(workers)]
    else:
        names = [check_name(name) for name in workers]
    if not 1 <= len(names) <= MAX_ID + 1:
        asked = workers if isinstance(workers, int) else len(names)
        raise ValueError(f"a group has 1 to {MAX_ID + 1} workers, but {asked} were asked for")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"every worker needs a name of its own, but {twice[0]!r} is given more than once")
    return names


class Meeting:
    """The store, the directory and the token of one group. They are gone when the `with` block ends."""

    def __init__(self, names: Sequence[str]) -> None:
        # Here and not above, so that a command line with a mistake in it is answered before torch is loaded.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch does not mark it so

        self.names = list(names)
        self.token = secrets.token_hex(32)
        listener = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            HOST, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.directory = tempfile.mkdtemp(prefix="tg-", dir=_short_temporary_directory())

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that make a process the worker of this rank."""
        size = str(len(self.names))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # A file, because torch's TCPStore makes libc look up the name of every address that connects to it.
            "TELEGRAD_INIT_METHOD": f"file://{self.directory}/store",
            "TELEGRAD_NAME": self.names[rank],
            "TELEGRAD_TOKEN": self.token,
            "TELEGRAD_RUNTIME_DIR": self.directory,
            # Workers share the machine's cores; one thread each is what torchrun chooses, too.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def close(self) -> None:
        """Remove the directory and end the store."""
        # A worker may have removed the directory already: what is wanted is that it is not there.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)
        # The store's thread and sockets end with its last reference.
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short_temporary_directory() -> str:
    """Return the temporary directory, or /tmp where the configured one is too long for the paths of unix sockets."""
    configured = tempfile.gettempdir()
    if len(os.fsencode(configured)) > _LONGEST_PARENT and os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    return configured
