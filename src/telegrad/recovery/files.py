"""Snapshots on disk: ``DIRECTORY/NUMBER/WORKER.pt``; ``DIRECTORY/latest.json`` names the last complete one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch

LATEST = "latest.json"


class Latest(msgspec.Struct, frozen=True):
    """The last complete snapshot."""

    number: int
    step: int


def write(directory: Path, number: int, worker: str, share: Any) -> None:
    """Write a worker's share. It is there completely or not at all, also after a crash."""
    folder = directory / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{worker}.pt", lambda path: torch.save(share, path))


def read(directory: Path, number: int, worker: str) -> Any:
    """Return a worker's share, or None if there is none."""
    path = directory / str(number) / f"{worker}.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def commit(directory: Path, latest: Latest) -> None:
    """Record that a snapshot is complete, and remove those before it."""
    _replace(directory / LATEST, lambda path: path.write_bytes(msgspec.json.encode(latest)))
    for folder in directory.iterdir():
        if folder.is_dir() and folder.name.isdecimal() and int(folder.name) < latest.number:
            shutil.rmtree(folder)


def latest(directory: Path) -> Latest | None:
    """Return the last complete snapshot, if there is one."""
    path = directory / LATEST
    return msgspec.json.decode(path.read_bytes(), type=Latest) if path.exists() else None


def _replace(path: Path, write_to: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_to(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
