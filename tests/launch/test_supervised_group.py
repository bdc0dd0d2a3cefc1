"""What `join` and `stop` mean for every engine, with workers and a supervisor that only exist in the test."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import pytest

from telegrad.errors import TelegradError
from telegrad.launch.base import GroupTimeout, WorkerFailed
from telegrad.launch.ray.outcome import Outcome
from telegrad.launch.supervised_group import SupervisedGroup
from telegrad.launch.supervisor import Failure
from telegrad.launch.worker_result import capture


@dataclass
class FakeWorker:
    name: str
    exitcode: int | None = None
    killed_on_purpose: bool = False
    ended: bool = False
    result: Outcome = field(default_factory=Outcome)

    def succeeded(self) -> bool:
        return self.exitcode == 0

    def end(self, outcome: Outcome) -> None:
        self.result, self.ended, self.exitcode = outcome, True, int(outcome.is_error())


class FakeGroup(SupervisedGroup[FakeWorker]):
    """Ends when the test says so, or when it was asked to stop `patience` times."""

    def __init__(self, patience: int = 1) -> None:
        super().__init__({name: FakeWorker(name) for name in "ab"})
        self.requests = 0
        self.found: list[Failure[FakeWorker | None]] = []
        self.again: set[str] = set()
        self.error: Exception | None = None
        self._patience = patience
        self.end = threading.Event()
        self.begin()

    def kill(self, name: str) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        self.end.wait()
        if self.error is not None:
            raise self.error

    def _request_stop(self) -> None:
        self.requests += 1
        if self.requests == self._patience:
            self.end.set()

    def _failures(self) -> Sequence[Failure[FakeWorker | None]]:
        return self.found

    def _to_restart(self) -> set[str]:
        return self.again


def returned(value: object) -> Outcome:
    return Outcome(cloudpickle.dumps(value))


class InterruptedEvent(threading.Event):
    """The first waits are interrupted, as by Ctrl-C."""

    interrupts = 2

    def wait(self, timeout: float | None = None) -> bool:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_a_second_interrupt_asks_again_and_the_end_is_awaited() -> None:
    group = FakeGroup(patience=2)
    group._done = InterruptedEvent()
    with pytest.raises(KeyboardInterrupt):
        group.join()
    assert group.requests == 2
    assert group._done.is_set()


def test_one_stop_is_one_request_however_often_it_is_called() -> None:
    group = FakeGroup()
    group.stop()
    group.stop()
    assert group.requests == 1
    with pytest.raises(TelegradError, match="the group was stopped before a, b finished"):
        group.join()


def test_a_timeout_names_who_has_not_finished() -> None:
    group = FakeGroup()
    group.processes["a"].end(returned(1))
    with pytest.raises(GroupTimeout) as caught:
        group.join(0.01)
    assert caught.value.unfinished == ["b"]


@pytest.mark.parametrize(("again", "unfinished"), [(set(), []), ({"b"}, ["b"])])
def test_a_killed_worker_is_unfinished_only_if_it_is_started_again(again: set[str], unfinished: list[str]) -> None:
    group = FakeGroup()
    group.again = again
    group.processes["a"].end(returned(1))
    group.processes["b"].killed_on_purpose = group.processes["b"].ended = True
    assert group._unfinished() == unfinished
    group.stop()


def test_the_results_of_those_that_finished_come_with_a_failure() -> None:
    group = FakeGroup()
    group.keep_going = True
    group.processes["a"].end(returned("fine"))
    group.processes["b"].end(Outcome(exception=capture(LookupError("x"))))
    group.found = [Failure(group.processes["b"], "raised LookupError: x")]
    group.end.set()
    with pytest.raises(WorkerFailed, match="worker b raised LookupError: x; the other workers finished") as caught:
        group.join()
    assert caught.value.results == {"a": "fine"}
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_failure_of_the_engine_names_no_worker() -> None:
    group = FakeGroup()
    group.found = [Failure(None, "srun ended with exit code 1 before a, b finished")]
    group.end.set()
    with pytest.raises(WorkerFailed, match=r"^srun ended with exit code 1 .*; all workers were stopped$") as caught:
        group.join()
    assert caught.value.worker == ""


def test_an_error_of_the_supervisor_is_raised_by_join() -> None:
    group = FakeGroup()
    group.error = OSError("no descriptors")
    group.end.set()
    with pytest.raises(TelegradError, match="its supervisor failed: no descriptors"):
        group.join()


def broken() -> Any:
    raise ValueError("cannot be read here")


class Broken:
    def __reduce__(self) -> Any:
        return broken, ()


def test_a_result_that_cannot_be_unpickled_here_names_its_worker() -> None:
    group = FakeGroup()
    group.processes["a"].end(returned(1))
    group.processes["b"].end(returned(Broken()))
    group.end.set()
    with pytest.raises(WorkerFailed, match="worker b returned a value that cannot be unpickled here: cannot be read"):
        group.join()


def test_a_fork_neither_stops_the_group_nor_waits_for_ever() -> None:
    """Programs that fork and exit run `stop` in the child, too, where no thread supervises."""
    group = FakeGroup()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.stop()
            group.join(60)
        except TelegradError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == f"only process {os.getpid()}, which has started this group, can wait for it"
    assert os.waitpid(child, 0)[1] == 0
    assert not group._stop_requested
    group.stop()
