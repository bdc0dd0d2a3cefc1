"""The directory of this user's unix sockets, which no other user can replace or write to.

Whoever can rename a directory on the way to the sockets can put sockets of his own in their place. So the directory
and all directories above it are checked.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from telegrad.errors import TelegradError

GROUP_DIRECTORY = "tg-"
"""How the names of directories begin that launchers make for the sockets of one group, in a temporary directory."""
_FULL = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the disk quota of this user is used up"}


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for this user's unix sockets. It is created if needed, and other users cannot write to it.

    This is ``TELEGRAD_RUNTIME_DIR``, or ``telegrad`` in ``XDG_RUNTIME_DIR`` if that belongs to this user, or a
    directory for this user in the system's temporary directory.
    """
    if environ.get("TELEGRAD_RUNTIME_DIR"):
        directory = Path(environ["TELEGRAD_RUNTIME_DIR"])
    elif environ.get("XDG_RUNTIME_DIR") and _is_ours(environ["XDG_RUNTIME_DIR"]):
        directory = Path(environ["XDG_RUNTIME_DIR"], "telegrad")
    else:
        directory = Path(tempfile.gettempdir(), f"telegrad-{os.geteuid()}")
    directory = directory.absolute()
    try:
        _make(directory)
        # Do not follow a symbolic link: in a shared directory, another user may have put it there.
        status = directory.lstat()
        _check_parents(directory)
    except OSError as error:
        raise TelegradError(f"cannot create the directory for unix sockets: {explain(error, directory)}") from error
    if stat.S_ISLNK(status.st_mode):
        raise TelegradError(
            f"{directory} is not a directory but a symbolic link; set TELEGRAD_RUNTIME_DIR to the directory itself"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise TelegradError(f"{directory} is not a directory; set TELEGRAD_RUNTIME_DIR to a directory of this user")
    if status.st_uid != os.geteuid():
        raise TelegradError(
            f"the directory {directory} belongs to user id {status.st_uid}, but this process runs as {os.geteuid()}; "
            "set TELEGRAD_RUNTIME_DIR to a directory of this user"
        )
    if status.st_mode & 0o022:
        raise TelegradError(
            f"other users can write to {directory} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run `chmod 700 {shlex.quote(str(directory))}`, or set TELEGRAD_RUNTIME_DIR"
        )
    return directory


def is_full(error: OSError) -> bool:
    """Return whether there was no room in a file system."""
    return error.errno in _FULL


def explain(error: OSError, directory: str | Path) -> str:
    """Return what prevents writing to `directory`, and what to do.

    >>> explain(OSError(errno.ENOSPC, "No space left on device"), "/run/user/1000")
    'no space is left in /run/user/1000; remove files there, or set TELEGRAD_RUNTIME_DIR to another file system'
    """
    full = _FULL.get(error.errno or 0)
    if full is not None:
        return f"{full} in {directory}; remove files there, or set TELEGRAD_RUNTIME_DIR to another file system"
    return f"{directory}: {error.strerror or error}; set TELEGRAD_RUNTIME_DIR to a directory of this user"


def _make(directory: Path) -> None:
    """Create the directory and its missing parents for this user alone, whatever the umask is."""
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if directory.is_symlink():  # refused later
            return
        if not directory.is_dir():
            raise


def _check_parents(directory: Path) -> None:
    """Raise an error if another user may rename a directory above `directory`, and so replace it."""
    resolved = directory.parent.resolve(strict=True)
    for parent in dict.fromkeys((*directory.parents, resolved, *resolved.parents)):
        status = parent.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise TelegradError(
                f"{parent}, on the way to the directory {directory} for unix sockets, is a symbolic link of user id "
                f"{status.st_uid}, who can replace it; set TELEGRAD_RUNTIME_DIR to another directory"
            )
        status = parent.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise TelegradError(
                f"every user can replace what is in {parent} (mode {stat.S_IMODE(status.st_mode):04o}), so the "
                f"directory {directory} for unix sockets is not safe; run `chmod +t {shlex.quote(str(parent))}`, or "
                "set TELEGRAD_RUNTIME_DIR to another directory"
            )


def _is_ours(directory: str) -> bool:
    try:
        status = os.stat(directory)
    except OSError:
        return False  # set but missing, as after su: use the next choice
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and os.access(directory, os.W_OK | os.X_OK)
