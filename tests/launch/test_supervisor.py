"""The rules of the supervisor, on real processes of `telegrad run`."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.launch.conftest import NAMES, SLEEP, Write, start_grandchild
from tests.support.processes import LivenessPipe, ResourceSnapshot

from telegrad.launch import supervisor
from telegrad.launch.local_rendezvous import LocalRendezvous
from telegrad.launch.restarts import RestartPolicy
from telegrad.launch.run import _start, run
from telegrad.launch.supervisor import StopRequests, Supervisor


def test_a_failure_stops_all_workers_and_sets_the_exit_code(
    write: Write, liveness: LivenessPipe, capfd: pytest.CaptureFixture[str]
) -> None:
    # Worker 1 fails only after worker 0 has opened this pipe, so that worker 0 is running.
    ready = f"{liveness.path}.ready"
    os.mkfifo(ready)
    command = write(
        start_grandchild(liveness)
        + f"""
if rank == 1:
    with open({ready!r}) as pipe:
        pipe.read()
    print("last words", file=sys.stderr)
    sys.exit(3)
open({ready!r}, "w").close()
signal.pause()
"""
    )
    assert run(command, NAMES) == 3
    liveness.wait_for_end()
    err = capfd.readouterr().err.splitlines()
    assert "worker1 | last words" in err
    assert err[-1] == "telegrad run: worker1 failed with exit code 3; 1 running worker stopped"


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(write: Write, tmp_path: Path) -> None:
    ignoring = tmp_path / "ignoring"
    os.mkfifo(ignoring)
    command = write(
        f"""
if rank == 0:
    open({str(ignoring)!r}).read()
    sys.exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(ignoring)!r}, "w").close()
while True:
    signal.pause()
"""
    )
    assert run(command, NAMES, grace=0.1) == 4


def test_a_worker_that_succeeds_leaves_no_grandchild(write: Write, liveness: LivenessPipe) -> None:
    ready = f"{liveness.path}.ready"
    os.mkfifo(ready)
    grandchild = f"import signal; f = open({str(liveness.path)!r}, 'w'); open({ready!r}, 'w').close(); signal.pause()"
    command = write(f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); open({ready!r}).read()")
    assert run(command, ["a"]) == 0
    liveness.wait_for_end()


def test_a_second_signal_kills_immediately(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    command = write(
        f"""
liveness = open({str(liveness.path)!r}, "w")
# Not print: the signal may arrive during the other print, and files are not reentrant.
signal.signal(signal.SIGINT, lambda *_: os.write(liveness.fileno(), b"ignored\\n"))
print("up", file=liveness, flush=True)
"""
        + SLEEP
    )
    launcher = launch("-n", "1", "--grace", "3600", *command)
    assert liveness.wait_for_lines(1) == ["up"]
    launcher.send_signal(signal.SIGINT)
    assert liveness.wait_for_lines(1) == ["ignored"]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    liveness.wait_for_end()


def test_no_process_outlives_a_killed_launcher(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    launcher = launch("-n", "2", *write(start_grandchild(liveness) + "signal.pause()"))
    directory = next(line for line in liveness.wait_for_lines(4) if line != "up")
    launcher.kill()
    launcher.wait(timeout=60)
    liveness.wait_for_end()
    shutil.rmtree(directory)  # No process is left to remove it.


# -- restarts -------------------------------------------------------------------------------------------------

NOW = partial(RestartPolicy, first_delay=0.0)  # a policy without delays
COUNT = """
restart = int(os.environ["TELEGRAD_RESTART"])
with open({path!r} + os.environ["TELEGRAD_NAME"], "a") as starts:
    print(restart, file=starts)
"""


def count_starts(directory: Path) -> str:
    """Return a script that adds a line to a file at each start."""
    return COUNT.format(path=f"{directory}/starts-")


def starts_of(directory: Path, name: str) -> list[str]:
    return (directory / f"starts-{name}").read_text().split()


def test_a_worker_that_dies_is_started_again(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = write(
        count_starts(tmp_path)
        + """
if rank == 1 and restart == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and restart == 1:
    raise ValueError("an exception")
print("finished", os.environ["TELEGRAD_NAME"], os.pread(int(os.environ["TELEGRAD_TOKEN_FD"]), 100, 0))
"""
    )
    monkeypatch.setenv("TELEGRAD_RESTART", "7")  # of an outer group
    assert run(command, NAMES, restarts=NOW(3)) == 0
    assert starts_of(tmp_path, "worker0") == ["0"]
    assert starts_of(tmp_path, "worker1") == ["0", "1", "2"]
    out, err = capfd.readouterr()
    tokens = dict(line.removeprefix(line[:10]).removeprefix("finished ").split() for line in out.splitlines())
    assert tokens["worker0"] == tokens["worker1"]
    assert [line for line in err.splitlines() if line.startswith("telegrad run")] == [
        "telegrad run: worker1 was killed by SIGKILL; started again (1 of 3 restarts within 300 s)",
        "telegrad run: worker1 failed with exit code 1; started again (2 of 3 restarts within 300 s)",
    ]
    assert "worker1 | ValueError: an exception" in err


def test_a_worker_is_given_up_after_the_last_restart(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write(count_starts(tmp_path) + "sys.exit(5) if rank == 1 else signal.pause()")
    assert run(command, NAMES, restarts=NOW(2, window=60.0)) == 5
    assert starts_of(tmp_path, "worker1") == ["0", "1", "2"]
    assert capfd.readouterr().err.splitlines() == [
        "telegrad run: worker1 failed with exit code 5; started again (1 of 2 restarts within 60 s)",
        "telegrad run: worker1 failed with exit code 5; started again (2 of 2 restarts within 60 s)",
        "telegrad run: worker1 failed with exit code 5 (after 2 restarts within 60 s); 1 running worker stopped",
    ]


def test_no_two_processes_of_one_name_live_at_the_same_time(write: Write, tmp_path: Path) -> None:
    # A lock belongs to all processes that have inherited the open file. So it is free only when all of them are gone.
    command = write(
        count_starts(tmp_path)
        + f"""
import fcntl
lock = open({str(tmp_path / "lock")!r}, "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open({str(tmp_path / "overlap")!r}, "w").close()
if restart < 8:
    text = "import signal; print('up', flush=True); signal.pause()"
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, pass_fds=[lock.fileno()])
    child.stdout.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert run(command, ["a"], restarts=NOW(8)) == 0
    assert len(starts_of(tmp_path, "a")) == 9
    assert not (tmp_path / "overlap").exists()


def test_a_worker_is_started_again_only_when_its_process_group_is_gone(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def live_for_a_while(group: int) -> list[int]:
        os.kill(group, 0)  # It is not reaped yet, so that its number is not reused.
        seen.append(len(starts_of(tmp_path, "a")))
        return [123] if len(seen) < 4 else []

    monkeypatch.setattr(supervisor, "live_processes", live_for_a_while)
    command = write(count_starts(tmp_path) + "sys.exit(restart == 0)")
    assert run(command, ["a"], restarts=NOW(1)) == 0
    assert seen == [1, 1, 1, 1, 2]


def test_a_worker_with_processes_that_cannot_be_killed_is_given_up(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "live_processes", lambda group: [123, 456])
    monkeypatch.setattr(supervisor, "_GROUP_GONE_WITHIN", 0.02)
    assert run(write(count_starts(tmp_path) + "sys.exit(3)"), ["a"], restarts=NOW(5)) == 3
    assert starts_of(tmp_path, "a") == ["0"]
    assert capfd.readouterr().err == (
        "telegrad run: a failed with exit code 3, and processes that it had started cannot be killed (123, 456); "
        "no other worker was running\n"
    )


def test_a_start_that_fails_counts_as_a_restart(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    popen, failing = subprocess.Popen, [False, True, False, True, True]

    def fail_sometimes(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if failing.pop(0):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*arguments, **options)

    monkeypatch.setattr("telegrad.launch.run.subprocess.Popen", fail_sometimes)
    assert run(write(count_starts(tmp_path) + "sys.exit(6)"), ["a"], restarts=NOW(4)) == 6
    assert starts_of(tmp_path, "a") == ["0", "2"]
    failed = "failed with exit code 6 and could not be started again: [Errno 11] Resource temporarily unavailable"
    assert capfd.readouterr().err.splitlines() == [
        f"telegrad run: a {failed}; started again (2 of 4 restarts within 300 s)",
        f"telegrad run: a {failed} (after 4 restarts within 300 s); no other worker was running",
    ]


def test_a_stop_during_the_delay_before_a_restart_ends_the_group(
    write: Write, tmp_path: Path, launch_python: Callable[[str], subprocess.Popen[str]]
) -> None:
    command = write(count_starts(tmp_path) + "sys.exit(3)")
    launcher = launch_python(
        "from telegrad.launch.restarts import RestartPolicy; from telegrad.launch.run import run; "
        f"raise SystemExit(run({command!r}, ['a'], restarts=RestartPolicy(3, first_delay=3600.0)))"
    )
    assert launcher.stderr is not None
    assert launcher.stderr.readline() == ("telegrad run: a failed with exit code 3; it is started again in 3600 s\n")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    assert launcher.stderr.read() == "telegrad run: stopped by SIGINT; all workers have exited\n"
    assert starts_of(tmp_path, "a") == ["0"]


def test_nothing_is_started_again_after_a_stop(
    write: Write, tmp_path: Path, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    command = write(
        count_starts(tmp_path) + f"f = open({str(liveness.path)!r}, 'w'); print('up', file=f, flush=True)\n" + SLEEP
    )
    launcher = launch("-n", "2", "--restart", "5", *command)
    liveness.wait_for_lines(2)
    launcher.send_signal(signal.SIGTERM)  # The workers die by this signal.
    assert launcher.wait(timeout=60) == 143
    liveness.wait_for_end()
    assert [starts_of(tmp_path, name) for name in NAMES] == [["0"], ["0"]]


def test_a_restart_that_is_due_when_the_group_stops_does_not_happen(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedInBetween(supervisor.Supervisor):
        def _restart(self, *arguments: Any) -> bool:
            planned = super()._restart(*arguments)
            self._stop(signal.SIGTERM)
            return planned

    monkeypatch.setattr("telegrad.launch.run.Supervisor", StoppedInBetween)
    run(write(count_starts(tmp_path) + "sys.exit(3)"), ["a"], restarts=NOW(3))
    assert starts_of(tmp_path, "a") == ["0"]


def test_restarts_leak_no_descriptors(write: Write) -> None:
    command = write("sys.exit(rank)")
    assert run(command, NAMES, restarts=NOW(1)) == 1
    before = ResourceSnapshot()
    assert run(command, NAMES, restarts=NOW(4)) == 1
    before.wait_until_restored()


# -- keep going -----------------------------------------------------------------------------------------------


def test_the_others_finish_if_they_are_told_to(write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    go = str(tmp_path / "go")
    os.mkfifo(go)
    command = write(
        f"""
if rank == 1:
    sys.exit(7)
if rank == 2:
    open({go!r}).read()
    sys.exit(8)
while not os.path.exists({go!r} + "2"):  # made below, when the first failure is reported
    os.sched_yield()
open({go!r}, "w").close()
print("finished")
"""
    )

    printed: list[str] = []

    def go_on(sentence: str) -> None:
        printed.append(sentence)
        Path(f"{go}2").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("telegrad.launch.run.print_status", go_on)
        assert run(command, ["a", "b", "c"], keep_going=True) == 7
    assert capfd.readouterr().out == "a | finished\n"
    assert printed[0] == "b failed with exit code 7; the other workers continue"
    assert printed[-1] == "b failed with exit code 7; c failed with exit code 8; 1 worker finished"


def test_keep_going_applies_after_the_last_restart(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write(count_starts(tmp_path) + "sys.exit(4)")
    assert run(command, ["a", "b"], restarts=NOW(1), keep_going=True) == 4
    assert [starts_of(tmp_path, name) for name in "ab"] == [["0", "1"], ["0", "1"]]
    last = capfd.readouterr().err.splitlines()[-1]
    one = "failed with exit code 4 (after 1 restart within 300 s)"
    assert last in (f"telegrad run: {x} {one}; {y} {one}; no worker finished" for x, y in ("ab", "ba"))


def test_a_signal_stops_a_group_in_which_a_worker_failed(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    opened = f"f = open({str(liveness.path)!r}, 'w')\nprint('up', file=f, flush=True)\n"
    launcher = launch("-n", "2", "--keep-going", *write(f"if rank == 1: sys.exit(3)\n{opened}{SLEEP}"))
    assert launcher.stderr is not None
    assert liveness.wait_for_lines(1) == ["up"]  # or its end would never come
    assert launcher.stderr.readline() == "telegrad run: worker1 failed with exit code 3; the other workers continue\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    liveness.wait_for_end()


def test_a_worker_that_a_signal_killed_counts_as_the_first_to_fail(tmp_path: Path) -> None:
    """The others fail because of it, and the loop may see all of them at once."""
    requests = StopRequests()
    with LocalRendezvous(NAMES) as rendezvous, Supervisor(requests) as watching:
        for rank, code in enumerate(["raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"]):
            watching.start(NAMES[rank], partial(_start, ["-c", code], rendezvous, rank, [], False))
        for worker in watching._running:
            assert select.select([worker.exit_fd], [], [], 60)[0]
        watching.run()
    requests.close()
    assert [(failure.worker.name, failure.description) for failure in watching.failures] == [
        ("worker1", "was killed by SIGKILL")
    ]
