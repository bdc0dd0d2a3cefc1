"""Prints the output of many workers in whole lines, each prefixed with the worker's name.

Bytes are passed on unchanged, even if a line is not valid UTF-8. An incomplete line is buffered until its end arrives,
up to `MAX_LINE` bytes, and then broken, which bounds the launcher's memory.

A carriage return inside a line (a progress bar) overwrites what is before it, as in a terminal. The bars of several
workers cannot share a terminal's last line, so each is printed as a line: at most once in `PROGRESS` seconds while it
changes, and when it is complete.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TextIO, cast

from telegrad.launch.worker import PipeConsumer

MAX_LINE = 16 * 1024 * 1024
PROGRESS = 2.0
_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


def prefixes(names: Sequence[str], target: TextIO | None) -> list[bytes]:
    """Return the line prefix of each worker, all of the same width, in colour if `target` is a terminal."""
    width = max(map(len, names))
    plain = [f"{name:<{width}} | " for name in names]
    if target is None or not target.isatty() or os.environ.get("NO_COLOR"):
        return [text.encode() for text in plain]
    return [f"\x1b[{_COLOURS[i % len(_COLOURS)]}m{text}\x1b[0m".encode() for i, text in enumerate(plain)]


class LoggedOutput:
    """Writes one worker's output to a file, and passes it on. A file that cannot be written is given up."""

    def __init__(self, consumer: PipeConsumer, file: BinaryIO) -> None:
        self._consumer = consumer
        self._file: BinaryIO | None = file

    def feed(self, piece: bytes) -> None:
        """Write `piece` at once: the file of a worker that hangs must show its last line."""
        if self._file is not None:
            try:
                _write_all(self._file, piece)
            except OSError as error:  # a full disk, say: no reason to stop the workers
                sentence = f"the rest of the output is not in {self._file.name}: {error}"
                print(f"telegrad run: {sentence}", file=sys.stderr, flush=True)
                self._file = None
        self._consumer.feed(piece)

    def close(self) -> None:
        """Pass on the end. The file stays open for the next start of the worker."""
        self._consumer.close()


class UnchangedOutput:
    """Writes one worker's output to `target` as it comes. Without a target (``python >&-``), nobody wants it."""

    def __init__(self, target: TextIO | None) -> None:
        self._target = target
        # For a stream that accepts text only: a character may be split between two pieces.
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, piece: bytes) -> None:
        """Write the bytes."""
        if self._target is None:
            return
        buffer = getattr(self._target, "buffer", None)
        if buffer is None:  # A notebook's stream or a StringIO, which accepts text only.
            self._target.write(self._decoder.decode(piece))
        else:
            self._target.flush()
            _write_all(cast("BinaryIO", buffer), piece)
        self._target.flush()

    def close(self) -> None:
        """Do nothing: everything is written."""


class PrefixedLines:
    """Prints one worker's output to `target` in whole lines, each prefixed with `prefix`."""

    def __init__(self, prefix: bytes, target: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._output = UnchangedOutput(target)
        self._clock = clock
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._progress = b""  # the state of an incomplete line that was printed last
        self._next_progress = 0.0

    def feed(self, piece: bytes) -> None:
        """Print the lines that `piece` completes and buffer the rest."""
        complete, newline, rest = piece.rpartition(b"\n")
        if newline:
            text = b"".join((*self._partial, complete))
            self._partial, self._partial_size = [], 0
            self._print(text)
        if not rest:
            return
        self._partial.append(rest)
        self._partial_size += len(rest)
        if b"\r" in rest:
            state = _visible(b"".join(self._partial))
            self._partial, self._partial_size = [state], len(state)
            if self._clock() >= self._next_progress and state.strip():
                self._print(state)
                self._progress, self._next_progress = state, self._clock() + PROGRESS
        if self._partial_size >= MAX_LINE:
            self.close()

    def close(self) -> None:
        """Print the buffered rest as a line."""
        if self._partial:
            text = b"".join(self._partial)
            self._partial, self._partial_size = [], 0
            self._print(text)

    def _print(self, lines: bytes) -> None:
        shown = [_visible(line) if b"\r" in line else line for line in lines.split(b"\n")]
        if self._progress:
            if shown[0] == self._progress:
                shown = shown[1:]  # it is complete, and was printed while it was not
            self._progress = b""
        # A single write, so that lines of other processes with the same target do not interleave with these.
        self._output.feed(b"".join(self._prefix + line + b"\n" for line in shown))


def _visible(line: bytes) -> bytes:
    r"""Return what a terminal would show of a line: what follows the last carriage return inside it.

    >>> _visible(b" 10%\r 20%"), _visible(b"an ordinary line\r")
    (b' 20%', b'an ordinary line\r')
    """
    text = line.rstrip(b"\r")
    return line[text.rfind(b"\r") + 1 :]


def _write_all(stream: BinaryIO, text: bytes) -> None:
    """Write all of `text`. An unbuffered stream (``python -u``) may accept only a part at a time."""
    rest = memoryview(text)
    while rest:
        rest = rest[stream.write(rest) :]
