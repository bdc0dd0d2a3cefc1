"""Tracebacks as users need them: frames of telegrad are folded, and an exception is shown once.

A remote exception crosses several of telegrad's functions on each worker, which say nothing about the error. So a run
of their frames becomes one line in the traceback that is sent, and the caller's own traceback ends at the function of
the API that it has called. An error that telegrad itself has raised by mistake keeps its frames. `FULL_VARIABLE` shows
all.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from types import TracebackType

from telegrad.calls.service_names import PREFIX
from telegrad.errors import TelegradError

FULL_VARIABLE = "TELEGRAD_FULL_TRACEBACKS"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_ANOMALY = os.path.join(_PACKAGE, "backward", "anomaly.py")
"""What raises there is an error of the program: a gradient that is NaN."""
_FOLDED = "<frames of telegrad>"
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>[^\n]+)$', re.MULTILINE)


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
        self.shown = self.text.removesuffix("".join(traceback.format_exception_only(error))).rstrip("\n")
        return self

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n\n{self.shown}"


def format_folded(error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception with its traceback, formatted as Python does, with frames of telegrad folded."""
    formatted = traceback.TracebackException(type(error), error, trace)
    if not os.environ.get(FULL_VARIABLE):
        _fold(formatted, error)
    return "".join(formatted.format())


def _fold(formatted: traceback.TracebackException, error: BaseException | None) -> None:
    expected = isinstance(error, TelegradError) or isinstance(getattr(error, "__cause__", None), RemoteTraceback)
    expected = expected or bool(formatted.stack and formatted.stack[-1].filename == _ANOMALY)
    formatted.stack = _Folded.of(formatted.stack, ours_at_the_end=not expected)
    for name in ("__cause__", "__context__"):
        chained = getattr(formatted, name)
        if chained is not None:
            _fold(chained, getattr(error, name, None))


class _Folded(traceback.StackSummary):
    """A stack in which runs of telegrad's frames are one line each."""

    @classmethod
    def of(cls, frames: traceback.StackSummary, *, ours_at_the_end: bool) -> _Folded:
        """Fold frames. With `ours_at_the_end`, those of the function that raised are kept."""
        kept = 0
        while ours_at_the_end and kept < len(frames) and frames[-1 - kept].filename.startswith(_PACKAGE):
            kept += 1
        folded, run = cls(), 0
        for frame in frames[: len(frames) - kept]:
            if frame.filename.startswith(_PACKAGE):
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
    """End the traceback of an expected error at the function that catches it, if all below are telegrad's."""
    trace = error.__traceback__
    expected = isinstance(error, TelegradError) or isinstance(error.__cause__, RemoteTraceback)
    if trace is None or not expected or os.environ.get(FULL_VARIABLE):
        return
    inner = trace.tb_next
    while inner is not None:
        if not inner.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return
        inner = inner.tb_next
    trace.tb_next = None


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
    frames = [frame for frame in _FRAME.finditer(text) if not frame["file"].startswith(_PACKAGE)]
    if frames:
        last = frames[-1]
        place = f" in {last['name']}, {os.path.basename(last['file'])}:{last['line']}"
    else:
        place = f" in {function}" if function and not function.startswith(PREFIX) else ""
    error.add_note(f"{_NOTE}{worker!r}{place})")
