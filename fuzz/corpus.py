"""The inputs of each target: seeds, what fuzzing found (``.fuzz``), what is committed, and crashes."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import telegrad
from fuzz.target import Target

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fuzz" / "corpus"
"""Committed inputs, which together reach what fuzzing has reached."""
CRASHES = ROOT / "fuzz" / "crashes"
"""Committed inputs that once raised something they should not."""
WORK = ROOT / ".fuzz"
"""What fuzzing on this machine found, not committed."""

_SOURCES = str(Path(telegrad.__file__).parent)


def inputs(target: Target) -> list[Path]:
    """Return the folders that libFuzzer reads. It writes new inputs to the first."""
    folders = [WORK / target.name]
    folders[0].mkdir(parents=True, exist_ok=True)
    return folders + [folder for folder in (CORPUS / target.name, CRASHES / target.name) if folder.is_dir()]


def committed(target: Target) -> list[Path]:
    """Return the committed inputs and crashes of a target."""
    folders = (CORPUS / target.name, CRASHES / target.name)
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def write_seeds(target: Target) -> None:
    """Write the seeds of a target where fuzzing starts."""
    folder = inputs(target)[0]
    for seed in target.seeds():
        (folder / _name(seed)).write_bytes(seed)


def minimize(target: Target, most_bytes: int = 100_000) -> str:
    """Replace the committed corpus of a target with the shortest inputs that reach the same lines and jumps.

    Independent of libFuzzer's own merge, which needs an executable for each target. The seeds stay: what msgspec does
    with them, in C, no tracing can see.
    """
    logging.getLogger("telegrad").propagate = False
    folders = inputs(target)
    kept = list(target.seeds())
    candidates = {path.read_bytes() for folder in folders for path in folder.iterdir()} - set(kept)
    reached: set[Any] = {arc for seed in kept for arc in _arcs(target, seed)}
    for data in sorted(candidates, key=lambda data: (len(data), data)):
        found = _arcs(target, data)
        if not found <= reached and sum(map(len, kept)) + len(data) <= most_bytes:
            reached |= found
            kept.append(data)
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for data in kept:
        (folder / _name(data)).write_bytes(data)
    size, among = sum(map(len, kept)), len(candidates) + len(kept)
    return f"{target.name}: {len(kept)} of {among} inputs, {size:,} bytes, {len(reached):,} lines and jumps"


def _name(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def _arcs(target: Target, data: bytes) -> set[Any]:
    """Return which line followed which in telegrad's sources while an input ran."""
    found: set[Any] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_SOURCES):
            return None
        last = 0

        def lines(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            found.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return lines

        found.add((name, 0, frame.f_lineno))
        return lines

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(before)
    return found


def all_inputs(targets: Iterable[Target]) -> list[tuple[Target, Path]]:
    """Return every committed input with its target."""
    return [(target, path) for target in targets for path in committed(target)]
