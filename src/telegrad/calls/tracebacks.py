"""Tracebacks as users need them: frames of telegrad are folded, and an exception is shown once.

A remote exception crosses several of telegrad's functions on each worker, which say nothing about the error. So a run
of their frames becomes one line in the traceback that is sent, and the caller's own traceback ends at the function of
the API that it has called. An error that telegrad itself has raised by mistake keeps its frames. `FULL_VARIABLE` shows
all.
"""

from __future__ import annotations

import os
import re
import threading
import traceback
from pathlib import Path
from types import TracebackType

from telegrad.calls.service_names import PREFIX
from telegrad.errors import PayloadError, TelegradError

FULL_VARIABLE = "TELEGRAD_FULL_TRACEBACKS"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_ANOMALY = os.path.join(_PACKAGE, "backward", "anomaly.py")
"""What raises there is an error of the program: a gradient that is NaN."""
_FOLDED = "<frames of telegrad>"
_PICKLING = f"{os.sep}cloudpickle{os.sep}"
_REPEATED = re.compile(
    r"(^|\n\n)The above exception was the direct cause of the following exception:"
    r"(\n\nTraceback \(most recent call last\):\n  \[\d+ frames? of telegrad\])?$"
)
"""The end of a traceback that says nothing: an error that was stored, as that of a value, is raised a second time."""
_FRAME = re.compile(r'^[ |]*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>[^\n]+)$', re.MULTILINE)


class RemoteTraceback(Exception):
    """Where on the callee an exception was raised. Python prints it above the exception itself."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text
        self.shown = text
        """The text without the exception at its end, if Python prints that below."""

    def followed_by(self, error: BaseException) -> RemoteTraceback:
        """Do not show the exception at the end of the text, because it is `error`, of which this is the cause."""
        text = self.text.removeprefix(f"{__name__}.{type(self).__name__}: {self._heading}\n\n")
        text = text.removesuffix("".join(traceback.format_exception_only(error))).rstrip("\n")
        self.shown = _REPEATED.sub("", text).rstrip("\n")
        return self

    @property
    def _heading(self) -> str:
        return f"on worker {self.worker!r}:"

    def __str__(self) -> str:
        return f"{self._heading}\n\n{self.shown}" if self.shown else f"{self._heading} no Python function was running"


def format_folded(error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception with its traceback, formatted as Python does, with frames of telegrad folded."""
    formatted = traceback.TracebackException(type(error), error, trace)
    if not os.environ.get(FULL_VARIABLE):
        _fold(formatted, error, expected=False)
    return "".join(formatted.format())


def _is_ours(filename: str) -> bool:
    """Return whether a frame says nothing about the program: it is of telegrad, or of what pickles for it."""
    return filename.startswith(_PACKAGE) or _PICKLING in filename


def _fold(formatted: traceback.TracebackException, error: BaseException | None, *, expected: bool) -> None:
    expected = (
        expected or isinstance(error, TelegradError) or isinstance(getattr(error, "__cause__", None), RemoteTraceback)
    )
    expected = expected or bool(formatted.stack and formatted.stack[-1].filename == _ANOMALY)
    formatted.stack = _Folded.of(formatted.stack, ours_at_the_end=not expected)
    for name in ("__cause__", "__context__"):
        chained = getattr(formatted, name)
        if chained is not None:
            _fold(chained, getattr(error, name, None), expected=isinstance(error, PayloadError))


class _Folded(traceback.StackSummary):
    """A stack in which runs of telegrad's frames are one line each."""

    @classmethod
    def of(cls, frames: traceback.StackSummary, *, ours_at_the_end: bool) -> _Folded:
        """Fold frames. With `ours_at_the_end`, those of the function that raised are kept."""
        kept = 0
        while ours_at_the_end and kept < len(frames) and _is_ours(frames[-1 - kept].filename):
            kept += 1
        folded, run = cls(), 0
        for frame in frames[: len(frames) - kept]:
            if _is_ours(frame.filename):
                run += 1
                continue
            folded._end_run(run)
            run = 0
            folded.append(frame)
        folded._end_run(run)
        folded.extend(frames[len(frames) - kept :])
        return folded

    def _end_run(self, length: int) -> None:
        if length:
            self.append(traceback.FrameSummary(_FOLDED, length, "", lookup_line=False, line=""))

    def format_frame_summary(self, frame: traceback.FrameSummary) -> str:
        """Return the lines of one frame, or of a folded run."""
        if frame.filename != _FOLDED:
            return super().format_frame_summary(frame)
        count = frame.lineno or 0
        return f"  [{count} frame{'s' if count > 1 else ''} of telegrad]\n"


def hide_frames(error: BaseException) -> None:
    """End the traceback of an expected error at the function that catches it, if all below are telegrad's.

    An interrupt is expected, and so is what a value raises that cannot be pickled, which is the cause of the error.
    """
    trace, cause = error.__traceback__, error.__cause__
    expected = isinstance(error, TelegradError | KeyboardInterrupt) or isinstance(cause, RemoteTraceback)
    if trace is None or not expected or os.environ.get(FULL_VARIABLE):
        return
    if isinstance(error, PayloadError) and cause is not None:
        cause.__traceback__ = _without_our_frames(cause.__traceback__)
    inner = trace.tb_next
    while inner is not None:
        filename = inner.tb_frame.f_code.co_filename
        if not _is_ours(filename) and not (isinstance(error, KeyboardInterrupt) and filename == threading.__file__):
            return
        inner = inner.tb_next
    trace.tb_next = None


def drop_frames(error: Exception) -> None:
    """Remove telegrad's frames above those of the program from an expected error that is reported with others."""
    expected = isinstance(error, TelegradError) or isinstance(error.__cause__, RemoteTraceback)
    if expected and not os.environ.get(FULL_VARIABLE):
        error.__traceback__ = _without_our_frames(error.__traceback__)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame of the program on."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


class short_tracebacks:  # noqa: N801 - used like a function
    """Hides the frames of telegrad in expected errors that leave a `with` block, as `hide_frames` does."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            hide_frames(error)


_NOTE = "(raised on worker "


def note_place(error: Exception, worker: str, function: str, text: str) -> None:
    """Add a note that says where an exception was raised, unless the worker that raised it has done so.

    It is the last line that Python prints. `text` is the remote traceback.
    """
    if any(isinstance(note, str) and note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    frames = [frame for frame in _FRAME.finditer(text) if not _is_ours(frame["file"])]
    if frames:
        last = frames[-1]
        place = f" in {last['name']}, {os.path.basename(last['file'])}:{last['line']}"
    else:
        place = f" in {function}" if function and not function.startswith(PREFIX) else ""
    error.add_note(f"{_NOTE}{worker!r}{place})")
