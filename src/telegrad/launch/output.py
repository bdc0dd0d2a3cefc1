"""Prints the output of many workers in whole lines, each prefixed with the worker's name.

Bytes are passed on unchanged, even if a line is not valid UTF-8. An incomplete line is buffered until its end arrives,
up to `MAX_LINE` bytes, and then broken, which bounds the launcher's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import BinaryIO, TextIO, cast

MAX_LINE = 16 * 1024 * 1024
_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


def prefixes(names: Sequence[str], target: TextIO) -> list[bytes]:
    """Return the line prefix of each worker, all of the same width, in colour if `target` is a terminal."""
    width = max(map(len, names))
    plain = [f"{name:<{width}} | " for name in names]
    if not target.isatty() or os.environ.get("NO_COLOR"):
        return [text.encode() for text in plain]
    return [f"\x1b[{_COLOURS[i % len(_COLOURS)]}m{text}\x1b[0m".encode() for i, text in enumerate(plain)]


class PrefixedLines:
    """Prints one worker's output to `target` in whole lines, each prefixed with `prefix`."""

    def __init__(self, prefix: bytes, target: TextIO) -> None:
        self._prefix = prefix
        self._target = target
        self._partial: list[bytes] = []
        self._partial_size = 0

    def feed(self, piece: bytes) -> None:
        """Print the lines that `piece` completes and buffer the rest."""
        complete, newline, rest = piece.rpartition(b"\n")
        if newline:
            text = b"".join((*self._partial, complete))
            self._partial, self._partial_size = [], 0
            self._print(text)
        if rest:
            self._partial.append(rest)
            self._partial_size += len(rest)
            if self._partial_size >= MAX_LINE:
                self.close()

    def close(self) -> None:
        """Print the buffered rest as a line."""
        if self._partial:
            text = b"".join(self._partial)
            self._partial, self._partial_size = [], 0
            self._print(text)

    def _print(self, lines: bytes) -> None:
        # A single write, so that lines of other processes with the same target do not interleave with these.
        text = b"".join(self._prefix + line + b"\n" for line in lines.split(b"\n"))
        buffer = getattr(self._target, "buffer", None)
        if buffer is None:  # A notebook's stream or a StringIO, which accepts text only.
            self._target.write(text.decode(errors="backslashreplace"))
        else:
            self._target.flush()
            _write_all(cast("BinaryIO", buffer), text)
        self._target.flush()


def _write_all(stream: BinaryIO, text: bytes) -> None:
    """Write all of `text`. An unbuffered stream (``python -u``) may accept only a part at a time."""
    rest = memoryview(text)
    while rest:
        rest = rest[stream.write(rest) :]
