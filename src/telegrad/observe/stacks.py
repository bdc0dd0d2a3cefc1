"""The Python stacks of this process's threads, and which line of the user's code each is in.

They are read with `faulthandler`, which walks the stacks in C while no thread can run Python code. Walking the frames
of `sys._current_frames` from another thread can crash CPython 3.11: their `f_back` may refer to freed memory.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from types import CoroutineType
from typing import NamedTuple

import torch

from telegrad.observe.model import Frame

_LONGEST_TEXT = 200
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_TRUNCATED = "  ..."
_MORE_THREADS = "..."
_MOST_AWAITS = 100


class Line(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


class Stack(NamedTuple):
    """The stack of a thread."""

    lines: Sequence[Line]
    """Innermost first."""
    truncated: bool = False
    """Whether it has more lines, further out."""


class Function(NamedTuple):
    """A function of telegrad that runs calls."""

    file: str
    """The end of the path."""
    name: str
    unless_called_by: str = ""


def parse(text: str) -> dict[int, Stack]:
    """Return the stacks in a dump of faulthandler, by Python's thread id.

    >>> parse('Thread 0x0f (most recent call first):\\n  File "a.py", line 3 in f\\n')
    {15: Stack(lines=[Line(file='a.py', line=3, function='f')], truncated=False)}
    """
    stacks: dict[int, Stack] = {}
    lines: list[Line] = []
    thread = 0
    for each in text.splitlines():
        if found := _THREAD.match(each):
            thread, lines = int(found[1], 16), []
            stacks[thread] = Stack(lines)
        elif found := _LINE.match(each):
            lines.append(Line(found[1], int(found[2]), found[3]))
        elif each == _TRUNCATED and thread:
            stacks[thread] = Stack(lines, True)
    return stacks


def _dump() -> str:
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            return file.read().decode(errors="replace")
    finally:
        os.close(descriptor)


class Stacks:
    """The stacks of all threads at one moment."""

    def __init__(self, worker: str) -> None:
        own = f"telegrad:{worker}:"
        threads = threading.enumerate()
        self.native = {thread.ident or 0: thread.native_id or 0 for thread in threads}
        """Native thread ids, by Python's."""
        # Several agents may share this process: the threads of another are not this worker's.
        foreign = {
            thread.ident
            for thread in threads
            if thread.name.startswith("telegrad:") and not thread.name.startswith(own)
        }
        text = _dump()
        self._stacks = {ident: stack for ident, stack in parse(text).items() if ident not in foreign}
        self._is_cut = f"\n{_MORE_THREADS}\n" in text

    def native_id(self, ident: int) -> int:
        """Return the native id of a thread; of one that has ended, a number that is none."""
        return self.native.get(ident, ident & 0x7FFFFFFF)

    def is_unknown(self, ident: int) -> bool:
        """Return whether a thread runs whose stack could not be read: faulthandler reads those of the latest 100."""
        return self._is_cut and ident in self.native and ident not in self._stacks

    def count(self, ident: int, functions: Iterable[Function]) -> int:
        """Return how many of these functions a thread is in. Of a very deep stack, the end is not known: at least 1."""
        stack = self._stacks.get(ident)
        if stack is None:
            return 0
        by_name = {function.name: function for function in functions}
        found = 0
        for number, line in enumerate(stack.lines):
            function = by_name.get(line.function)
            if function is None or not line.file.endswith(function.file):
                continue
            caller = stack.lines[number + 1].function if number + 1 < len(stack.lines) else ""
            found += not function.unless_called_by or caller != function.unless_called_by
        return max(found, 1) if stack.truncated else found

    def where(self, ident: int) -> str:
        """Return file and line of the innermost user code; empty if the thread runs none."""
        stack = self._stacks.get(ident)
        if self.is_unknown(ident):
            return f"an unknown line: it has {len(self.native)} threads, and the stacks of the latest 100 can be read"
        for line in stack.lines if stack is not None else ():
            if _is_users(line.file):
                return f"{line.file}:{line.line} in {line.function}"
        return ""

    def all(self) -> dict[int, tuple[Frame, ...]]:
        """Return the stacks, innermost last, by native thread id."""
        return {self.native_id(ident): _frames(stack) for ident, stack in self._stacks.items()}


def where_it_awaits(coroutine: object) -> str:
    """Return file and line of the innermost user code of a coroutine that awaits; empty if that is not known.

    The frames of a coroutine that does not run may be read: they belong to it, and `f_back` is not used.
    """
    where = ""
    for _ in range(_MOST_AWAITS):
        if not isinstance(coroutine, CoroutineType) or coroutine.cr_running or coroutine.cr_frame is None:
            break
        code, line = coroutine.cr_frame.f_code, coroutine.cr_frame.f_lineno
        if _is_users(code.co_filename):
            where = f"{code.co_filename}:{line} in {code.co_name}"
        coroutine = coroutine.cr_await
    return where


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, _TORCH, _STANDARD, "<frozen"))


def _frames(stack: Stack) -> tuple[Frame, ...]:
    return tuple(
        Frame(
            line.file,
            line.line,
            line.function,
            linecache.getline(line.file, line.line).strip()[:_LONGEST_TEXT],
            not _is_users(line.file),
        )
        for line in reversed(stack.lines)
    )
