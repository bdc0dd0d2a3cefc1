"""Checks of what happens when a worker fails, and of mistakes in the arguments of `start`."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from telegrad.errors import PayloadError
from telegrad.launch.base import Group, WorkerFailed
from telegrad.testing.contract import BrokenPromise
from telegrad.testing.launch_contract.harness import Harness, expect, hold, this_worker, wait_forever

_CODE = 7


class Problem(Exception):
    """An exception that can be pickled."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("it has a lock")
        self.lock = threading.Lock()


def _b_raises(directory: str, error: type[Exception], *args: Any) -> None:
    if this_worker() != "b":
        wait_forever(directory)
    while not Path(directory, "a").exists():  # ends when a has started, or this group is stopped
        threading.Event().wait(0.01)
    raise error(*args)


def _b_exits(code: int) -> None:
    if this_worker() == "b":
        os._exit(code)


def _dies_once(directory: str) -> str:
    marker = Path(directory, f"{this_worker()}.died")
    if this_worker() == "b" and not marker.exists():
        marker.touch()
        os._exit(_CODE)
    return this_worker()


def _failure(harness: Harness, group: Group) -> WorkerFailed:
    try:
        found = group.join(harness.patience)
    except WorkerFailed as error:
        return error
    raise BrokenPromise(f"join returned {found}, though a worker failed")


def an_exception_keeps_its_type_and_has_a_traceback(harness: Harness) -> None:
    """The error names the worker, and shows where it raised."""
    error = _failure(harness, harness.start(_b_raises, harness.directory, Problem, 17))
    cause = error.__cause__
    expect(error.worker == "b", f"the error names {error.worker!r}")
    expect(isinstance(cause, Problem) and cause.number == 17, f"the cause is {cause!r}")
    expect("_b_raises" in error.remote_traceback, f"the traceback is {error.remote_traceback!r}")
    expect("worker b" in str(error) and "Problem: 17" in str(error), f"the message is {str(error)!r}")


def an_exception_that_cannot_be_pickled_is_text(harness: Harness) -> None:
    """Its traceback is there."""
    error = _failure(harness, harness.start(_b_raises, harness.directory, _Unpicklable))
    expect(error.worker == "b" and error.__cause__ is None, f"it is {error!r} from {error.__cause__!r}")
    expect("it has a lock" in error.remote_traceback, f"the traceback is {error.remote_traceback!r}")


def a_failure_stops_the_others(harness: Harness) -> None:
    """None is left when `join` raises."""
    group = harness.start(_b_raises, harness.directory, Problem, 17)
    _failure(harness, group)
    expect(not harness.is_running("a"), "a worker still runs")


def a_process_that_dies_is_named(harness: Harness) -> None:
    """It raises nothing, so there is no cause."""
    error = _failure(harness, harness.start(_b_exits, _CODE))
    expect(error.worker == "b", f"the error names {error.worker!r}: {error}")
    expect(error.exitcode in (None, _CODE), f"the exit code is {error.exitcode}")


def an_early_end_with_code_0_is_a_failure(harness: Harness) -> None:
    """The function did not return."""
    error = _failure(harness, harness.start(_b_exits, 0))
    expect(error.worker == "b", f"the error names {error.worker!r}: {error}")


def a_result_that_cannot_be_pickled_is_a_failure(harness: Harness) -> None:
    """The error says whose."""
    error = _failure(harness, harness.start(lambda: threading.Lock() if this_worker() == "b" else 0))
    expect(error.worker == "b", f"the error names {error.worker!r}: {error}")


def joining_again_raises_again(harness: Harness) -> None:
    """The outcome of a group does not change."""
    group = harness.start(_b_exits, _CODE)
    expect(str(_failure(harness, group)) == str(_failure(harness, group)), "the errors differ")


def arguments_that_cannot_be_pickled_are_refused(harness: Harness) -> None:
    """Before anything is started."""
    try:
        harness.start(lambda lock: None, threading.Lock())
    except PayloadError:
        return
    raise BrokenPromise("a lock was sent to the workers")


def invalid_names_are_refused(harness: Harness) -> None:
    """No name twice, no name that is not one, and no group without workers."""
    for workers in (["a", "a"], ["a b"], [], 0, "ab"):
        try:
            harness.start(this_worker, workers=workers)
        except ValueError:
            continue
        raise BrokenPromise(f"a group of the workers {workers!r} was started")


def a_worker_that_dies_is_started_again_under_its_name(harness: Harness) -> None:
    """Its last start has the result."""
    harness.needs_restarts()
    found = harness.run(_dies_once, harness.directory, restart=1)
    expect(found == ["a", "b"], f"the results are {found}")
    expect(Path(harness.directory, "b.died").exists(), "b did not die")


def a_worker_without_restarts_left_has_failed(harness: Harness) -> None:
    """The others are stopped."""
    harness.needs_restarts()
    error = _failure(harness, harness.start(_exits_while_a_waits, harness.directory, restart=1))
    expect(error.worker == "b", f"the error names {error.worker!r}: {error}")
    expect(not harness.is_running("a"), "a worker still runs")


def _exits_while_a_waits(directory: str) -> None:
    if this_worker() == "b":
        os._exit(_CODE)
    hold(directory, "a")
    threading.Event().wait()


FAILURE_CHECKS = (
    an_exception_keeps_its_type_and_has_a_traceback,
    an_exception_that_cannot_be_pickled_is_text,
    a_failure_stops_the_others,
    a_process_that_dies_is_named,
    an_early_end_with_code_0_is_a_failure,
    a_result_that_cannot_be_pickled_is_a_failure,
    joining_again_raises_again,
    arguments_that_cannot_be_pickled_are_refused,
    invalid_names_are_refused,
    a_worker_that_dies_is_started_again_under_its_name,
    a_worker_without_restarts_left_has_failed,
)
