"""The rendezvous of a group on one machine, hosted by the launcher: a store, a directory and a token.

The launcher hosts the store on a socket that it has already bound, so no other program can take the port. The socket
listens on the loopback address only. Torch's ``env://`` rendezvous connects to it as a client, because the environment
says that an agent hosts the store (as under torchrun).

Telegrad itself uses a file in the directory, because torch's TCPStore does a reverse name lookup for every connection,
which takes seconds if no name server answers. Torch removes such a file when its last user closes it, even if somebody
opens it at that moment. So the launcher is one of its users until the end.

If the group is to go on when a worker dies (`outlives_workers`), telegrad uses the store of the launcher instead. Torch
writes an entry to a file in several steps, and whoever reads the file after a worker died between two of them waits
forever, in a loop that cannot be interrupted. The store of the launcher only loses the connection of the dead worker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from telegrad.connection.token_source import TOKEN_VARIABLES, Token, write_to_descriptor
from telegrad.connection.worker_record import AWAIT_VARIABLE, MAX_ID, check_name
from telegrad.environment.terminal import without_terminal
from telegrad.errors import TelegradError
from telegrad.launch.listening import LOOPBACK, listen
from telegrad.transport.ports import PORTS_VARIABLE
from telegrad.transport.runtime_directory import GROUP_DIRECTORY, explain, runtime_directory

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

# On Linux, the path of a unix socket has at most 107 bytes. Leave more than half of them for names in the directory.
_MAX_PARENT_LENGTH = 40
_AWAITED = 60  # seconds within which a worker that was started again is there: backoff, imports and rendezvous


def worker_names(workers: int | Sequence[str]) -> list[str]:
    """Return the names of the group's workers in rank order. Raises a ValueError if they are invalid.

    >>> worker_names(2)
    ['worker0', 'worker1']
    >>> worker_names(["ps", "trainer"])
    ['ps', 'trainer']
    """
    if isinstance(workers, str):
        raise ValueError(f"workers must be a number or a list of names, not the string {workers!r}")
    if not isinstance(workers, int | Iterable):
        raise TypeError(f"workers must be a number or a list of names, not {workers!r}")
    if isinstance(workers, int):
        names = [f"worker{rank}" for rank in range(workers)]
    else:
        names = [check_name(name) for name in workers]
    if not 1 <= len(names) <= MAX_ID + 1:
        requested = workers if isinstance(workers, int) else len(names)
        raise ValueError(f"a group has 1 to {MAX_ID + 1} workers, but {requested} were requested")
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise ValueError(f"every worker needs its own name, but {duplicates[0]!r} is given more than once")
    return names


class LocalRendezvous:
    """The store, the directory and the token of one group, removed when the `with` block ends.

    `awaits_replacements` says that workers that die are started again, so the others wait for them when they shut down.
    """

    def __init__(
        self,
        names: Sequence[str],
        devices_per_worker: int | None = None,
        *,
        outlives_workers: bool = False,
        awaits_replacements: bool = False,
    ) -> None:
        # Imported here, so that mistakes in a command line are reported before torch is loaded.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

        self.names = list(names)
        self.token_descriptor = -1
        self._awaited = {AWAIT_VARIABLE: str(_AWAITED)} if awaits_replacements else {}
        self._devices = device_shares(len(self.names), devices_per_worker)
        self.directory = _make_directory(_parent_directory(os.environ))
        try:
            self.token = Token(secrets.token_hex(32).encode())
            self.token_descriptor = write_to_descriptor(self.token.decode())
            """An anonymous file with the token, for the workers; see `telegrad.connection.token_source`."""
            listener = listen(os.environ.get(PORTS_VARIABLE, ""), loopback=True)
            self.port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            path = f"{self.directory}/store"
            self._file: FileStore | None = None if outlives_workers else _open_file(path)
            self.init_method = f"tcp://{LOOPBACK}:{self.port}" if outlives_workers else f"file://{path}"
            """The URL at which the workers meet."""
        except BaseException:
            shutil.rmtree(self.directory)
            if self.token_descriptor != -1:
                os.close(self.token_descriptor)
            raise

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of the worker with this rank: this process's, without its tokens, and what is new.

        It lacks the token of the group (see `token_descriptor`) and `RESTART_VARIABLE`.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in TOKEN_VARIABLES}
        return {**inherited, **self._variables(rank)}

    def _variables(self, rank: int) -> dict[str, str]:
        size = str(len(self.names))
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TELEGRAD_INIT_METHOD": self.init_method,
            "TELEGRAD_NAME": self.names[rank],
            "TELEGRAD_RUNTIME_DIR": self.directory,
            # Workers share the machine's cores. Like torchrun, give each one thread.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **({"TELEGRAD_DEVICES": self._devices[rank]} if self._devices else {}),
            **self._awaited,
            **without_terminal(os.environ),
        }

    def close(self) -> None:
        """Remove the directory and close the store."""
        # A worker may already have removed the directory.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)
        self._file = None  # After the file is removed, so that torch need not write to it.
        os.close(self.token_descriptor)
        # Dropping the last reference ends the store's thread and closes its sockets.
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def device_shares(workers: int, devices_per_worker: int | None) -> list[str]:
    """Return the devices of each worker. Raises a ValueError if there are too few."""
    if devices_per_worker is None:
        return []
    from telegrad.worker_devices import share  # imported here, because it loads torch

    return [share(rank, workers, devices_per_worker, os.environ) for rank in range(workers)]


def _make_directory(parent: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=GROUP_DIRECTORY, dir=parent)
    except OSError as error:
        raise TelegradError(f"cannot make a directory for the group: {explain(error, parent)}") from error


def _open_file(path: str) -> FileStore:
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in __all__

    try:
        return FileStore(path)
    except RuntimeError as error:  # as if the file system is full
        raise TelegradError(f"cannot make the rendezvous file {path} of the group: {error}") from error


def _parent_directory(environ: Mapping[str, str]) -> str:
    """Return where to make the directory of the group: where the user wants sockets, or with temporary files.

    In a worker of another group, the variable names the directory of that group, which may end earlier.
    """
    if environ.get("TELEGRAD_RUNTIME_DIR") and not environ.get("TELEGRAD_INIT_METHOD"):
        wanted = str(runtime_directory(environ))
        if len(os.fsencode(wanted)) <= _MAX_PARENT_LENGTH:
            return wanted
    return _short_temporary_directory()


def _short_temporary_directory() -> str:
    """Return the temporary directory, or /tmp if the configured one is too long for the paths of unix sockets."""
    configured = tempfile.gettempdir()
    if len(os.fsencode(configured)) > _MAX_PARENT_LENGTH and os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    return configured
