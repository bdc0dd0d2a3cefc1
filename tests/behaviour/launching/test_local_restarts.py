"""`telegrad.launch.local` and `start` with workers that die and are started again, or let the others go on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import ResourceSnapshot, wait_until

from telegrad.errors import TelegradError
from telegrad.launch import GroupTimeout, WorkerFailed, local, start
from telegrad.launch.restarts import RestartPolicy

MODULE = sys.modules["telegrad.launch.local"]  # in the package, the name is that of the function


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "RestartPolicy", lambda *limits: RestartPolicy(*limits, first_delay=0.0))


def restart() -> int:
    return int(os.environ["TELEGRAD_RESTART"])


def rank() -> int:
    return int(os.environ["RANK"])


def die_until(last: int) -> tuple[int, int]:
    if rank() == 1 and restart() < last:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank(), restart()


def raise_until(last: int) -> int:
    if restart() < last:
        raise ValueError(f"attempt {restart()}")
    return restart()


def fail_on_one() -> int:
    if rank() == 1:
        raise ValueError("one")
    if rank() == 2:
        os._exit(9)
    return rank()


def wait_on_one() -> None:
    if rank() == 1:
        signal.pause()


def test_the_result_of_the_last_start_counts(capfd: pytest.CaptureFixture[str]) -> None:
    assert local(die_until, 2, (2,), init=False, restart=2) == [(0, 0), (1, 2)]
    assert capfd.readouterr().err.splitlines() == [
        "telegrad launch: worker1 was killed by SIGKILL before its function returned; started again "
        f"({number} of 2 restarts within 300 s)"
        for number in (1, 2)
    ]


def test_an_exception_is_a_reason_to_start_again_and_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert local(raise_until, ["a"], (1,), init=False, restart=3, restart_window=20) == [1]
    err = capfd.readouterr().err
    assert err.startswith(
        "telegrad launch: a raised ValueError: attempt 0; started again (1 of 3 restarts within 20 s)\nTraceback"
    )
    assert "in raise_until" in err


def test_the_failure_says_how_often_the_worker_was_started_again() -> None:
    with pytest.raises(WorkerFailed, match=r"ValueError: attempt 2 \(after 2 restarts within 300 s\); ") as caught:
        local(raise_until, ["a"], (9,), init=False, restart=2)
    assert caught.value.remote_traceback.endswith("ValueError: attempt 2\n")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_worker_that_exits_with_0_is_not_started_again() -> None:
    with pytest.raises(WorkerFailed, match=r"a exited with code 0 before its function returned; the other"):
        local(lambda: os._exit(0), ["a"], init=False, restart=5)


def test_a_worker_that_raises_but_does_not_exit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> int:
        import threading

        if restart() == 0:
            threading.Thread(target=signal.pause).start()  # The process waits for this thread when it exits.
            raise ValueError
        return restart()

    monkeypatch.setattr(MODULE, "GRACE", 0.01)
    assert local(work, 1, init=False, restart=1) == [1]


def test_no_two_processes_of_one_name_live_at_the_same_time(tmp_path: Path) -> None:
    def work(path: str) -> int:
        lock = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if anybody who has inherited it is left
        if restart() < 5:
            text = "import signal; print('up', flush=True); signal.pause()"
            child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, pass_fds=[lock])
            child.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
            os.kill(os.getpid(), signal.SIGKILL)
        return restart()

    assert local(work, 1, (str(tmp_path / "lock"),), init=False, restart=5) == [5]


def test_a_worker_started_again_finds_the_environment_of_its_first_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work() -> tuple[str, str]:
        if restart() == 0:
            signal.pause()
        return os.environ["OF_THE_PROGRAM"], os.getcwd()

    monkeypatch.setenv("OF_THE_PROGRAM", "before")
    before = os.getcwd()
    with start(work, ["a"], init=False, restart=1) as group:
        monkeypatch.setenv("OF_THE_PROGRAM", "after")
        monkeypatch.chdir(tmp_path)
        group.kill("a")
        assert group.join(60) == [("before", before)]


def test_a_worker_killed_on_purpose_is_started_again_as_long_as_it_may() -> None:
    with start(wait_on_one, ["a", "b"], init=False, restart=1) as group:
        first = group.processes["b"]
        group.kill("b")
        wait_until(lambda: group.processes["b"] is not first)
        assert first.exitcode == -signal.SIGKILL
        group.kill("b")
        assert group.join(60) == [None, None]


def test_a_stop_while_a_worker_waits_to_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "RestartPolicy", lambda *limits: RestartPolicy(*limits, first_delay=3600))
    for timeout in (None, 0.01):
        with start(raise_until, ["a"], (1,), init=False, restart=1) as group:
            wait_until(lambda: group._supervisor.to_restart == {"a"})
            if timeout is None:
                group.stop()
                with pytest.raises(TelegradError, match="stopped before a finished"):
                    group.join()
            else:
                with pytest.raises(GroupTimeout, match=r"^a did not finish within 0\.01 seconds"):
                    group.join(timeout)


def test_the_others_finish_if_they_are_told_to(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        local(fail_on_one, 4, init=False, keep_going=True)
    assert caught.value.results == {"worker0": 0, "worker3": 3}
    text = str(caught.value)
    assert "worker1 raised ValueError: one" in text
    assert "worker2 exited with code 9 before its function returned" in text
    assert "the other workers finished" in text
    assert "were stopped" not in text


def test_keep_going_applies_after_the_last_restart() -> None:
    def work() -> int:
        if rank() == 1:
            raise ValueError(restart())
        return rank()

    with pytest.raises(WorkerFailed, match=r"worker1 raised ValueError: 1 \(after 1 restart within 300 s\)") as caught:
        local(work, 2, init=False, restart=1, keep_going=True)
    assert caught.value.results == {"worker0": 0}


def test_results_that_cannot_be_unpickled_are_left_out() -> None:
    class Broken:
        def __reduce__(self) -> tuple[type, tuple[str]]:
            return int, ("not a number",)

    def work() -> object:
        if rank() == 0:
            raise ValueError
        return Broken() if rank() == 1 else rank()

    with pytest.raises(WorkerFailed, match="worker0 raised") as caught:
        local(work, 3, init=False, keep_going=True)
    assert caught.value.results == {"worker2": 2}


def test_restarts_leak_no_threads_or_descriptors() -> None:
    local(die_until, 2, (1,), init=False, restart=1)
    before = ResourceSnapshot()
    local(die_until, 2, (4,), init=False, restart=4)
    before.wait_until_restored()


@pytest.mark.parametrize("arguments", [{"restart": -1}, {"restart": 1, "restart_window": 0}])
def test_impossible_limits_are_refused_before_the_start(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="restarts must be"):
        local(rank, 1, init=False, **arguments)  # type: ignore[arg-type]  # one of them is a float


def test_workers_of_a_group_with_restarts_find_each_other() -> None:
    def call() -> int:
        import telegrad.rpc

        return int(telegrad.rpc.rpc_sync({"a": "b", "b": "a"}[os.environ["TELEGRAD_NAME"]], rank))

    assert local(call, ["a", "b"], timeout=60, restart=1, keep_going=True) == [1, 0]
