"""Snapshots on disk: ``DIRECTORY/snapshot-NUMBER-RUN/WORKER.pt``.

``DIRECTORY/latest.json`` names the last complete one. Each run of a training writes folders of its own, so
that what a run of before still writes never mixes with it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from telegrad.errors import RecoveryFailed

_log = logging.getLogger("telegrad")

LATEST = "latest.json"
_FOLDER = re.compile(r"snapshot-(\d+)-[0-9a-f]+")


class Latest(msgspec.Struct, frozen=True):
    """The last complete snapshot."""

    number: int
    step: int
    run: str

    def folder(self, directory: Path) -> Path:
        """Return where the shares of the snapshot are."""
        return folder_of(directory, self.number, self.run)


def folder_of(directory: Path, number: int, run: str) -> Path:
    """Return where the shares of a snapshot are."""
    return directory / f"snapshot-{number}-{run}"


def create(directory: Path) -> None:
    """Create the directory of a training, if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecoveryFailed(
            f"the directory {directory} for snapshots cannot be created: {error}. Pass another one, or check the "
            "permissions"
        ) from error


def write(folder: Path, worker: str, share: Any) -> None:
    """Write a worker's share. It is there completely or not at all, also after a crash."""
    path = folder / f"{worker}.pt"
    _check_readable(worker, share)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda temporary: _save(share, temporary))
    except OSError as error:
        raise RecoveryFailed(
            f"worker {worker!r} cannot write its snapshot to {path}: {error}. Check that the disk has room "
            "and that the worker may write there, and start the training again: it goes on from the last snapshot"
        ) from error


def read(folder: Path, worker: str) -> Any:
    """Return a worker's share, or None if there is none."""
    path = folder / f"{worker}.pt"
    try:
        _check_intact(path)
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecoveryFailed(
            f"worker {worker!r} cannot read its snapshot from {path}: {error}. Check the disk and the permissions, and "
            "start the training again: it goes on from the last snapshot"
        ) from error
    except Exception as error:
        raise RecoveryFailed(
            f"worker {worker!r} cannot read its snapshot from {path}: {_last_line(error)}. Pass another directory to "
            "begin the training anew"
        ) from error


def commit(directory: Path, new: Latest, workers: Iterable[str], before: Latest | None = None) -> None:
    """Record that a snapshot is complete, and remove those before it.

    `before` is the last complete one that this run knows. Raises if the directory has one of another run instead.
    """
    folder = new.folder(directory)
    found = latest(directory)
    if found is not None and found != before and found.run != new.run:
        raise RecoveryFailed(
            f"another training has written snapshot {found.number} to {directory} since this one began: pass each "
            "training a directory of its own, and end this one before you start it again"
        )
    try:
        there = {path.name for path in folder.iterdir()} if folder.exists() else set()
        unseen = [worker for worker in workers if f"{worker}.pt" not in there]
        if not unseen:
            _replace(directory / LATEST, lambda path: path.write_bytes(msgspec.json.encode(new)))
    except OSError as error:
        raise RecoveryFailed(
            f"the snapshot in {directory} cannot be completed: {error}. Make room or check the permissions, and start "
            "the training again: it goes on from the one before"
        ) from error
    if unseen:
        raise RecoveryFailed(
            f"worker {unseen[0]!r} has written its snapshot to {folder}, but it is not there for the worker that "
            "drives the training: the directory must be on a file system that all workers share, and nothing else may "
            "remove files there"
        )
    _remove_before(directory, new.number)


def _remove_before(directory: Path, number: int) -> None:
    try:
        for other in list(directory.iterdir()):
            match = _FOLDER.fullmatch(other.name)
            if match is not None and int(match[1]) < number:
                shutil.rmtree(other)
    except OSError as error:  # on a network file system, say, while somebody reads it
        _log.warning("the snapshots in %s before number %d cannot be removed: %s", directory, number, error)


def latest(directory: Path) -> Latest | None:
    """Return the last complete snapshot, if there is one."""
    path = directory / LATEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Latest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecoveryFailed(
            f"{path}, which names the last snapshot, cannot be read: {error}. Check the disk and the permissions, or "
            "pass another directory"
        ) from error
    except msgspec.MsgspecError as error:
        raise RecoveryFailed(
            f"{path} does not name a snapshot of a training ({error}): pass a directory that nothing else uses"
        ) from error


def _save(share: Any, path: Path) -> None:
    try:
        with path.open("wb") as file:  # if the disk is full, torch does not say so for a path
            torch.save(share, file)
    except RuntimeError as error:  # torch could not end the file after this
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _check_intact(path: Path) -> None:
    """Raise if a file is not as it was written: torch writes checksums, but does not compare them."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"it is damaged ({damaged} has changed since it was written)")


def _check_readable(worker: str, share: Any) -> None:
    """Raise if `read` would refuse what is not a tensor in a share: later, that would be too late."""
    stream = io.BytesIO()
    try:
        torch.save(_without_tensors(share), stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        raise RecoveryFailed(
            f"the snapshot of worker {worker!r} contains what cannot be read back from disk: {_last_line(error)}. "
            "With a directory, the state must consist of tensors, Python's own numbers, strings, lists, tuples, sets "
            "and dicts"
        ) from error


def _without_tensors(value: Any) -> Any:
    """Return a value without the tensors that can always be read: not those of other classes."""
    if type(value) is torch.Tensor:
        return None
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each) for each in value)
    return value


def _last_line(error: Exception) -> str:
    """Return what an error of torch is about; its texts have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("WeightsUnpickler error")]
    return (named or lines or [type(error).__name__])[0]


def _replace(path: Path, write_to: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_to(temporary)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
