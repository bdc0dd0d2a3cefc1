"""Checks of how groups end before their workers have finished."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.launch.base import Group, GroupTimeout, WorkerFailed
from telegrad.testing.contract import BrokenPromise, NotApplicable
from telegrad.testing.launch_contract.harness import Harness, expect, hold, this_worker, wait_forever


def _only_b_waits(directory: str) -> str:
    if this_worker() == "b":
        wait_forever(directory)
    Path(directory, "a").touch()
    return "finished"


def _wait_for_a_file(directory: str, name: str) -> str:
    hold(directory, this_worker())
    while not Path(directory, name).exists():  # ends with the file, or when the group is stopped
        threading.Event().wait(0.01)
    return "continued"


def _raises_stopped(group: Group) -> bool:
    try:
        group.join(0)
    except (WorkerFailed, GroupTimeout):
        return False
    except TelegradError:
        return True
    return False


def a_join_that_times_out_stops_all_and_names_the_unfinished(harness: Harness) -> None:
    """Only those."""
    group = harness.start(_only_b_waits, harness.directory)
    harness.wait_until_running("a", "b")
    try:
        group.join(5.0)
    except GroupTimeout as error:
        expect(error.unfinished == ["b"], f"the error names {error.unfinished}")
        expect(not harness.is_running("b"), "a worker still runs")
        return
    raise BrokenPromise("join returned, though a worker never finishes")


def stop_ends_all_workers(harness: Harness) -> None:
    """When it returns, they are gone. Once more is harmless."""
    group = harness.start(wait_forever, harness.directory)
    harness.wait_until_running("a", "b")
    group.stop()
    expect(not harness.is_running("a") and not harness.is_running("b"), "a worker still runs")
    group.stop()
    expect(_raises_stopped(group), "join did not say that the group was stopped")


def a_group_can_be_stopped_before_its_workers_are_up(harness: Harness) -> None:
    """In whatever state the launcher is."""
    group = harness.start(wait_forever, harness.directory)
    group.stop()
    expect(_raises_stopped(group), "join did not say that the group was stopped")
    for name in ("a", "b"):
        started = Path(harness.directory, name).exists()
        expect(not started or not harness.is_running(name), "a worker still runs")


def the_end_of_the_with_block_stops_the_group(harness: Harness) -> None:
    """Also if the block raises."""
    try:
        with harness.start(wait_forever, harness.directory):
            harness.wait_until_running("a", "b")
            raise LookupError("an error of the user")
    except LookupError:
        pass
    expect(not harness.is_running("a") and not harness.is_running("b"), "a worker still runs")


def a_stop_after_the_end_keeps_the_results(harness: Harness) -> None:
    """The outcome of a group does not change."""
    group = harness.start(this_worker)
    before = group.join(harness.patience)
    group.stop()
    expect(group.join(harness.patience) == before == ["a", "b"], "the results are gone")


def a_killed_worker_leaves_the_others_running(harness: Harness) -> None:
    """Its result is None."""
    group = harness.start(_wait_for_a_file, harness.directory, "go")
    harness.wait_until_running("a", "b")
    group.kill("b")
    harness.wait_until(lambda: not harness.is_running("b"), "the end of b")
    expect(harness.is_running("a"), "a worker that was not killed is gone")
    Path(harness.directory, "go").touch()
    found = group.join(harness.patience)
    expect(found == ["continued", None], f"the results are {found}")
    group.kill("b")


def only_workers_of_the_group_can_be_killed(harness: Harness) -> None:
    """The error names those."""
    with harness.start(this_worker) as group:
        try:
            group.kill("c")
        except UnknownWorker as error:
            expect("a, b" in str(error), f"the message is {str(error)!r}")
            return
    raise BrokenPromise("a worker of no group was killed")


def an_interrupted_join_stops_the_group(harness: Harness) -> None:
    """Ctrl-C is passed on as KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        raise NotApplicable("only the main thread is interrupted")
    group = harness.start(wait_forever, harness.directory)
    harness.wait_until_running("a", "b")
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        group.join(harness.patience)
    except KeyboardInterrupt:
        expect(not harness.is_running("a") and not harness.is_running("b"), "a worker still runs")
        return
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    raise BrokenPromise("join returned, though it was interrupted")


ENDING_CHECKS = (
    a_join_that_times_out_stops_all_and_names_the_unfinished,
    stop_ends_all_workers,
    a_group_can_be_stopped_before_its_workers_are_up,
    the_end_of_the_with_block_stops_the_group,
    a_stop_after_the_end_keeps_the_results,
    a_killed_worker_leaves_the_others_running,
    only_workers_of_the_group_can_be_killed,
    an_interrupted_join_stops_the_group,
)
