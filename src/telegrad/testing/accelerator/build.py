"""Compiles the simulated accelerator once for each release of torch, and caches the library.

The cache is the directory `telegrad` in `XDG_CACHE_HOME` or `~/.cache`. Processes load code from it, so it has to
belong to this user, and no other user may write to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from telegrad.errors import TelegradError

HERE = Path(__file__).parent
SOURCE = HERE / "library.cpp"
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)
COMPILERS = ("c++", "g++", "clang++")
DEADLINE = 600.0
"""Seconds for compiling, also by another process that this one waits for."""


def why_impossible(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why the library can neither be found in the cache nor be compiled, or None."""
    if _library(environ).exists() or _compiler(environ) is not None:
        return None
    return (
        "the simulated accelerator has to be compiled, and there is no C++ compiler: "
        f"install one of {', '.join(COMPILERS)}, or set CXX"
    )


def build(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the library. It is compiled if it is not in the cache."""
    library = _library(environ)
    _make_safe(library.parent)
    if library.exists():
        return library
    with _locked(library.parent / "accelerator.lock"):
        if not library.exists():  # another process may have compiled it meanwhile
            _compile(library, environ)
    return library


def _library(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    sources = [path.read_bytes() for path in sorted((*HERE.glob("*.h"), SOURCE))]
    parts = (*sources, torch.__version__.encode(), " ".join(FLAGS).encode(), platform.machine().encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return Path(cache, "telegrad", f"accelerator-{key}.so").absolute()


def _compiler(environ: Mapping[str, str]) -> list[str] | None:
    """Return the command of the compiler: `CXX` may contain options, or name a wrapper such as ccache."""
    if environ.get("CXX"):
        command = shlex.split(environ["CXX"])
        return command if shutil.which(command[0], path=environ.get("PATH")) else None
    return next(([name] for name in COMPILERS if shutil.which(name, path=environ.get("PATH"))), None)


def _make_safe(directory: Path) -> None:
    """Create the cache for this user alone, and raise an error if another user can change it."""
    remedy = "set XDG_CACHE_HOME to a directory of this user"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()  # not of what a symbolic link points to: another user may have made the link
    except OSError as error:
        raise TelegradError(f"cannot create the cache {directory}: {error.strerror or error}; {remedy}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise TelegradError(f"the cache {directory} has to be a directory of user id {os.geteuid()}; {remedy}")
    if status.st_mode & 0o022:
        raise TelegradError(
            f"other users can write to the cache {directory} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run `chmod 700 {shlex.quote(str(directory))}`, or {remedy}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes respect."""
    deadline = time.monotonic() + DEADLINE
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TelegradError(
                        f"another process compiles the simulated accelerator and holds {path}"
                    ) from None
                time.sleep(0.05)
        yield


def _compile(library: Path, environ: Mapping[str, str]) -> None:
    compiler = _compiler(environ)
    if compiler is None:
        raise TelegradError(str(why_impossible(environ)))
    package = Path(torch.__file__).parent
    headers = [f"-isystem{package / 'include' / path}" for path in ("", "torch/csrc/api/include")]
    unfinished = library.with_suffix(f".{os.getpid()}.new")
    libraries = (f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10")
    command = [*compiler, *FLAGS, *headers, str(SOURCE), "-o", str(unfinished), *libraries]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, env=dict(environ)
        )
        if result.returncode != 0:
            lines = "\n".join(result.stderr.strip().splitlines()[-10:])
            raise TelegradError(f"{compiler[0]} cannot compile the simulated accelerator:\n{lines}")
        unfinished.replace(library)
    except subprocess.TimeoutExpired as error:
        raise TelegradError(f"{compiler[0]} did not compile the simulated accelerator in {DEADLINE:g} s") from error
    finally:
        unfinished.unlink(missing_ok=True)
