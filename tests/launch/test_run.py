"""`telegrad run`, on real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.conftest import NAMES, SLEEP, Write, start_grandchild
from tests.support.processes import LivenessPipe, ResourceSnapshot

from telegrad.launch.run import run


def test_success_returns_zero_and_prefixes_the_output(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    command = write("print('out', sys.argv[1:]); sys.stderr.write('err without end')")
    assert run([*command, "--x", "1"], ["a", "bee"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["a   | out ['--x', '1']", "bee | out ['--x', '1']"]
    assert sorted(err.splitlines()) == ["a   | err without end", "bee | err without end"]


def test_without_prefix_workers_write_directly(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    command = write("os.write(1, b'plain\\n')")  # in one write: print writes the newline separately
    assert run(command, NAMES, prefix=False) == 0
    assert capfd.readouterr().out == "plain\nplain\n"


def test_long_lines_and_bytes_that_are_not_text_are_unchanged(
    write: Write, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    command = write("sys.stdout.buffer.write(b'\\xff' * 1_000_000 + b'\\nend')")
    assert run(command, ["a"]) == 0
    assert capfdbinary.readouterr().out == b"a | " + b"\xff" * 1_000_000 + b"\na | end\n"


def test_the_environment_tells_each_worker_its_devices(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = write("print(os.environ.get('TELEGRAD_DEVICES'))")
    monkeypatch.setenv("TELEGRAD_DEVICES", "3,2,1,0")
    assert run(command, ["a", "b"], devices_per_worker=2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["a | 3,2", "b | 1,0"]
    assert run(command, ["a"]) == 0  # as the user set it
    assert capfd.readouterr().out == "a | 3,2,1,0\n"
    monkeypatch.delenv("TELEGRAD_DEVICES")
    assert run(command, ["a"]) == 0
    assert capfd.readouterr().out == "a | None\n"


def test_the_environment_tells_each_worker_its_name_and_rank(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    command = write(f"import json; json.dump(dict(os.environ), open({str(tmp_path)!r} + f'/{{rank}}', 'w'))")
    assert run(command, ["a", "b"]) == 0
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert [first[key] for key in ("RANK", "LOCAL_RANK", "TELEGRAD_NAME")] == ["0", "0", "a"]
    assert [second[key] for key in ("RANK", "LOCAL_RANK", "TELEGRAD_NAME")] == ["1", "1", "b"]
    for key in ("MASTER_PORT", "TELEGRAD_TOKEN_FD", "TELEGRAD_RUNTIME_DIR"):
        assert first[key] == second[key]
    expected = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert {key: first[key] for key in expected} == expected
    assert "TELEGRAD_TOKEN" not in first
    assert not Path(first["TELEGRAD_RUNTIME_DIR"]).exists()
    assert dict(os.environ) == before


def test_a_module_can_be_run(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("sys.exit(7 if sys.argv[1:] == ['-m'] else 0)")
    monkeypatch.chdir(tmp_path)
    assert run(["-m", "script", "-m"], ["a"]) == 7


def test_the_exit_code_is_128_plus_the_number_of_a_fatal_signal(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else signal.pause()")
    assert run(command, NAMES) == 137
    assert "telegrad run: worker0 was killed by SIGKILL; 1 running worker stopped" in capfd.readouterr().err


def test_a_worker_killed_by_kill_9_is_started_again(
    write: Write, tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    command = write(
        f"""
with open({str(tmp_path / "starts")!r}, "a") as starts:
    print(os.environ["TELEGRAD_RESTART"], rank, file=starts)
if rank == 1 and os.environ["TELEGRAD_RESTART"] != "2":
    with open({str(pids)!r}, "w") as pipe:
        print(os.getpid(), file=pipe)
    signal.pause()
"""
    )
    launcher = launch("-n", "2", "--restart", "2", "--restart-window", "60", *command)
    for _ in range(2):
        os.kill(int(pids.read_text()), signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert sorted((tmp_path / "starts").read_text().splitlines()) == ["0 0", "0 1", "1 1", "2 1"]
    assert err.splitlines() == [
        f"telegrad run: worker1 was killed by SIGKILL; started again ({number} of 2 restarts within 60 s)"
        for number in (1, 2)
    ]


def test_no_threads_descriptors_or_handlers_are_leaked(write: Write) -> None:
    command = write("sys.exit(rank)")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run(command, NAMES) == 1  # torch keeps some resources after the first use
    before = ResourceSnapshot()
    assert run(command, NAMES) == 1
    before.wait_until_restored()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_is_forwarded_and_stops_all_workers(
    number: signal.Signals,
    code: int,
    write: Write,
    liveness: LivenessPipe,
    launch: Callable[..., subprocess.Popen[str]],
) -> None:
    command = write(
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('got SIGINT')))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('got SIGTERM')))\n"
        + start_grandchild(liveness)
        + SLEEP
    )
    launcher = launch("-n", "2", "--grace", "60", *command)
    directory = next(line for line in liveness.wait_for_lines(4) if line != "up")
    assert os.path.isdir(directory)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert sorted(out.splitlines()) == [f"worker0 | got {number.name}", f"worker1 | got {number.name}"]
    assert err == f"telegrad run: stopped by {number.name}; all workers have exited\n"
    liveness.wait_for_end()
    assert not os.path.exists(directory)


def test_the_group_stops_when_its_output_is_closed(
    write: Write, liveness: LivenessPipe, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    launcher = launch("-n", "2", *write(f"w = open({str(liveness.path)!r}, 'w')\nwhile True: print('y')"))
    assert launcher.stdout is not None
    assert "| y" in launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 141
    liveness.wait_for_end()
    assert launcher.stderr is not None
    assert launcher.stderr.read() == ""


def test_the_output_of_each_worker_is_also_in_the_directory_of_logs(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write("print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(0)")
    logs = tmp_path / "new" / "logs"
    for _ in range(2):
        assert run(command, ["a", "b"], log_dir=str(logs)) == 0
    assert {path.name: sorted(path.read_text().splitlines()) for path in logs.iterdir()} == {
        f"{name}.log": ["err", "err", "out", "out"] for name in ("a", "b")
    }
    assert "a | out" in capfd.readouterr().out


def test_the_attached_worker_has_the_terminal_and_the_others_have_none(write: Write, tmp_path: Path) -> None:
    script = write(
        """
hook = os.environ.get("PYTHONBREAKPOINT", "").rpartition(".")[2]
os.write(1, f"{rank} {os.isatty(0)} {os.isatty(1)} {hook}\\n".encode())  # at once: both write to the terminal
if rank == 1:
    answer = input("name? ")
    print("typed", answer, flush=True)
"""
    )
    process, terminal = pty.fork()
    if process == 0:
        os.execv(
            sys.executable, [sys.executable, "-m", "telegrad.cli", "run", "-n", "2", "--attach", "worker1", *script]
        )
    shown, typed = b"", False
    while piece := _read(terminal):
        shown += piece
        if b"name? " in shown and not typed:
            os.write(terminal, b"Ada\n")
            typed = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, shown
    lines = [line.strip() for line in re.sub(r"\x1b\[\d+m", "", shown.decode()).splitlines()]
    assert "1 True True" in lines
    assert "typed Ada" in lines
    # It may come while the other worker's prompt stands in the line.
    assert any(line.endswith("worker0 | 0 False False no_breakpoint") for line in lines)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports the end of a terminal so
        return b""
